from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from hyfi_core.models.by_name import BUILT_IN
from workflows.config.load import load_config
from workflows.config.page import ConfigKey, page, sections, settings
from workflows.config.run import Config
from workflows.config.section import section_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "config.md"
GIVEN = {"data.store": "archive", "data.size_px": "2048", "run.dir": "runs/a", "run.epochs": "3"}
OF_TILES = {"data.tiles": "{size_px: 224}", "model.encoder": "{name: timm:vit_small_patch16_224}"}

EVERY = [setting for name, model in sections() for setting in settings(model, f"{name}.")]


def choices(kind: Any) -> Iterator[str]:
    """Yield the words that an annotation allows, wherever in it they stand."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        for inner in get_args(kind):
            yield from choices(inner)


def annotation(key: str) -> Any:
    section: Any = Config
    *sections_of_it, name = key.split(".")
    for outer in sections_of_it:
        section = section_of(section.model_fields[outer])
    return section.model_fields[name].annotation


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m workflows.config.page > docs/config.md"


def test_every_key_of_a_resolved_run_is_there(tmp_path: Path) -> None:
    def leaves(tree: dict[str, Any], prefix: str) -> Iterator[str]:
        for name, value in tree.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{name}.")

    file = tmp_path / "run.yaml"
    file.write_text("")
    tiles = {key: value for key, value in GIVEN.items() if key != "data.size_px"} | OF_TILES
    resolved = [load_config(file, [f"{k}={v}" for k, v in given.items()]).model_dump() for given in (GIVEN, tiles)]
    found = {key for tree in resolved for key in leaves(tree, "")} - set(resolved[0])
    assert {setting.key for setting in EVERY} == found


@pytest.mark.parametrize("setting", EVERY, ids=lambda setting: setting.key)
def test_a_key_says_what_may_stand_there_and_what_it_means(setting: ConfigKey) -> None:
    assert setting.allowed, "no Field(description=…) in workflows/config"
    assert setting.meaning, f"not of the form 'allowed values: meaning': {setting.allowed!r}"
    words = re.findall(r"\w+", setting.allowed)
    assert [choice for choice in choices(annotation(setting.key)) if choice not in words] == []


def test_sections_say_what_they_are_for() -> None:
    assert [name for name, model in sections() if not (model.__doc__ or "").strip()] == []


def test_built_in_models_are_named() -> None:
    (name,) = (setting for setting in EVERY if setting.key == "model.name")
    assert [model for model in BUILT_IN if model not in name.allowed] == []


def test_defaults_are_those_of_a_run_and_yaml(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("")
    given = [f"{key}={value}" for key, value in GIVEN.items()]
    shown = [s for s in EVERY if s.default is not None and s.key not in GIVEN]
    of_tiles = [s for s in shown if s.key.startswith(("data.tiles.", "model.encoder.", "model.aggregator."))]
    assert load_config(file, [*(f"{s.key}={s.default}" for s in shown if s not in of_tiles), *given]) == load_config(
        file, given
    )
    tiles = [f"{k}={v}" for k, v in (GIVEN | OF_TILES).items() if k != "data.size_px"]
    assert load_config(file, [*tiles, *(f"{s.key}={s.default}" for s in of_tiles)]) == load_config(file, tiles)
    needed = {setting.key for setting in EVERY if setting.default is None}
    assert needed == {"data.store", "run.dir", "model.encoder.name"}


def test_rows_have_four_cells_whatever_the_words() -> None:
    row = ConfigKey("a.b", "x | y", "1", "either|or").row()
    assert row == r"| `a.b` | x \| y | `1` | either\|or |"
    rows = [line for line in page().splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} == {5}
