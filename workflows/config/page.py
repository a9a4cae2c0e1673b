"""Generator of ``docs/config.md``: every key of a run's YAML, from the schema.

Written by ``python -m workflows.config.page > docs/config.md``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from workflows.config.run import Config
from workflows.config.section import section_of

HEAD = """\
# Configuration of a run

This is the YAML that `hyfi train FILE.yaml` takes (`workflows/recipes/slides.yaml` is one to start from); on the \
command line, `section.key=value` overrides the file; the value is YAML: \
`hyfi train mine.yaml optimizer.lr=1e-4 'plan.grids=[[2, 2]]' run.early_stop=null`.

Keys marked *needed* have no default; a default of `null` means that the key is not set. Relative paths start from \
the working directory.

<!-- Written by `python -m workflows.config.page > docs/config.md`; the texts are in workflows/config. -->
"""


@dataclass(frozen=True)
class ConfigKey:
    """One key of the file.

    Attributes:
        key: ``section.key``, as on the command line.
        allowed: The accepted values.
        default: The default as YAML; None if the key is required.
        meaning: The effect of the key.
    """

    key: str
    allowed: str
    default: str | None
    meaning: str

    @classmethod
    def from_field(cls, key: str, field: FieldInfo) -> ConfigKey:
        """Return the key of a pydantic field, whose description is ``allowed: meaning``."""
        allowed, _, meaning = (field.description or "").partition(": ")
        default = None if field.is_required() else as_yaml(field.get_default(call_default_factory=True))
        return cls(key, allowed, default, meaning)

    def row(self) -> str:
        """Return the key as a row of a Markdown table."""
        default = "*needed*" if self.default is None else f"`{self.default}`"
        cells = (f"`{self.key}`", self.allowed, default, self.meaning)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    """Return the whole page as Markdown."""
    return "\n".join([HEAD, *(_section(name, model) for name, model in sections())])


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield (name, model) of each section of the file."""
    for name, field in Config.model_fields.items():
        model = section_of(field)
        assert model is not None, f"{name} is not a section"
        yield name, model


def settings(model: type[BaseModel], prefix: str) -> Iterator[ConfigKey]:
    """Yield the keys of a section, each followed by its nested keys; ``prefix``: the section's name and a dot."""
    for name, field in model.model_fields.items():
        yield ConfigKey.from_field(f"{prefix}{name}", field)
        inner = section_of(field)
        if inner is not None:
            yield from settings(inner, f"{prefix}{name}.")


def as_yaml(value: Any) -> str:
    """Return ``value`` on one line, as it would be in the file."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    text = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf)
    return text.removesuffix("...\n").rstrip("\n")


def _section(name: str, model: type[BaseModel]) -> str:
    intro = (inspect.getdoc(model) or "").replace("``", "`")
    rows = "\n".join(setting.row() for setting in settings(model, f"{name}."))
    return f"## {name}\n\n{intro}\n\n| key | may be | default | meaning |\n|---|---|---|---|\n{rows}\n"


if __name__ == "__main__":
    print(page(), end="")
