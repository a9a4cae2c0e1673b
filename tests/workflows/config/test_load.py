from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from workflows.config.load import MAY_CHANGE_ON_RESUME, changed_keys, dump_resolved, load_config, refuse_changes
from workflows.config.ranks import PlanConfig

SMALL = """
data: {store: archive, size_px: 2048}
run: {dir: runs/a, epochs: 3}
optimizer: {lr: 1e-3}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(SMALL)
    return file


def test_defaults_and_what_the_file_says(path: Path) -> None:
    config = load_config(path)
    assert config.data.size_px == (2048, 2048)
    assert config.data.store == Path("archive")
    assert (config.data.view, config.data.min_coverage, config.data.mpp) == ("pack", 0.9, 1.0)
    assert config.optimizer.lr == 1e-3  # YAML 1.1 reads 1e-3 as text
    assert config.ranks == 1


def test_overrides_are_yaml_values(path: Path) -> None:
    words = [
        "plan.grids=[[2, 2], [1, 1]]",
        "roles.loaders=1",
        "run.epochs=null",
        "run.steps=7",
        "model.options.width=16",
    ]
    config = load_config(path, words)
    assert config.plan.grids == ((2, 2), (1, 1))
    assert config.ranks == 6
    assert (config.run.epochs, config.run.steps) == (None, 7)
    assert config.model.options == {"width": 16}


def test_a_plan_has_the_fields_and_defaults_of_the_core() -> None:
    plan = ParallelPlan(grids=((1, 1),))
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    del fields["shares"]  # roles.shares
    assert PlanConfig().model_dump() == fields
    assert PlanConfig().build() == plan


@pytest.mark.parametrize("given", [True, False])
def test_augment_is_also_a_plain_switch(path: Path, given: bool) -> None:
    augment = load_config(path, [f"data.augment={str(given).lower()}"]).data.augment
    assert augment.flips is given
    assert (augment.stain > 0) is given


@pytest.mark.parametrize(("given", "means"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("'on'", "on")])
def test_on_and_off_are_words(path: Path, tmp_path: Path, given: str, means: str) -> None:
    """YAML reads them as true and false."""
    config = load_config(path, [f"run.compile={given}"])
    assert config.run.compile == means
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_resolved(config))
    assert load_config(resolved).run.compile == means


def test_resolved_file_gives_the_same_run(path: Path, tmp_path: Path) -> None:
    config = load_config(
        path,
        [
            "data.size_px=[512, 1024]",
            "plan.grids=[[1, 2], [1, 1]]",
            "plan.cuts=[layer2]",
            "model.classes=[benign, malignant]",
        ],
    )
    written = tmp_path / "resolved.yaml"
    written.write_text(dump_resolved(config))
    assert load_config(written) == config
    assert "min_coverage: 0.9" in written.read_text()


def test_config_cannot_be_changed(path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(path).run.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.stor=x", ["data.stor", "did you mean data.store?", "size_px"]),
        ("datta.store=x", ["datta", "did you mean data?"]),
        ("zzz.store=x", ["zzz: unknown (given: {'store': 'x'}); allowed sections: data"]),
        ("data.augment.flip=1", ["data.augment.flip", "did you mean data.augment.flips?", "stain"]),
        ("data.size_px=big", ["data.size_px", "'big'", "whole number of pixels"]),
        ("data.view=tiles", ["data.view", "'tiles'", "pack or crop"]),
        ("data.min_coverage=1.5", ["data.min_coverage", "1.5", "from 0 to 1"]),
        ("optimizer.lr=.nan", ["optimizer.lr", "nan", "> 0"]),
        ("optimizer.name=adma", ["optimizer.name", "'adma'", "sgd, adam, adamw, lamb, lion", "package.module:Class"]),
        ("plan.grids=[[0, 2]]", ["plan.grids", "[[0, 2]]", "[[1, 2]]"]),
        ("plan.schedule=1F1B", ["plan.schedule", "'1F1B'", "1f1b"]),
        ("plan.cuts=[layer2]", ["plan", "names 1 module(s), but 1 stage(s) need 0"]),
        ("plan.microbatches=3", ["data.batch_size", "given 1", "1 × 3 = 3"]),
        ("run.steps=5", ["exactly one of epochs and steps", "epochs: 3 and steps: 5"]),
        ("run.epochs=null", ["exactly one of epochs and steps", "neither"]),
        ("run.precision=fp16", ["run.precision", "'fp16'", "bfloat16"]),
        ("data.store=null", ["data.store", "None", "hyfi ingest"]),
        ("validation.split=test", ["validation.split", "'test'", "val or train"]),
        ("lr_schedule.name=step", ["lr_schedule", "every_steps"]),
        ("roles.design=[inline]", ["roles.design", "['inline']", "offload_data"]),  # was a traceback
        ("seed=3", ["'seed=3'", "section.key=value"]),
        ("plan=fast", ["'plan=fast'", "section.key=value"]),
        ("run.seed", ["'run.seed'", "section.key=value"]),
        ("run.seed=[", ["'['", "not a YAML value"]),
    ],
)
def test_wrong_settings_are_answered(path: Path, override: str, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        load_config(path, [override])
    assert [word for word in words if word not in str(caught.value)] == []


def test_all_faults_are_told_at_once(path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        load_config(path, ["data.stor=1", "run.seed=-1", "model.pool=min"])
    assert "3 wrong settings" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 4


def test_missing_keys_are_named(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("data:\n")
    with pytest.raises(RequestError) as caught:
        load_config(file)
    for name in ("data.store: missing", "data.size_px: missing", "run: missing; needed: a section with the keys dir"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("data: [", "not YAML"),
        ("- a\n", "allowed: sections"),
        ("run: {seed: 1, seed: 2}", "occurs twice"),
        ("run: {[seed]: 1}", "unhashable key"),
    ],
)
def test_what_is_no_config(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(RequestError, match=word):
        load_config(file)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere\.yaml: no such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_run_goes_on_only_with_what_may_change(path: Path) -> None:
    before = load_config(path)
    longer = load_config(path, ["run.epochs=9", "plan.grids=[[1, 2]]", "roles.validators=1"])
    assert set(changed_keys(before, longer)) == {"run.epochs", "plan.grids", "roles.validators"}
    refuse_changes(before, longer)
    with pytest.raises(RequestError) as caught:
        refuse_changes(before, load_config(path, ["optimizer.lr=0.5", "model.options.width=8", "run.epochs=9"]))
    assert "optimizer.lr: the run has 0.001, given now 0.5" in str(caught.value)
    assert "model.options" in str(caught.value)
    assert "run.epochs: the run has" not in str(caught.value)


def test_a_run_that_ran_out_of_memory_goes_on_without_cuda_graphs(path: Path) -> None:
    """YAML reads off as false, which was refused; and the key changes no result, but was refused as one that does."""
    without = load_config(path, ["run.cuda_graphs=off"])
    assert without.run.cuda_graphs == "off"
    refuse_changes(load_config(path), without)
    with pytest.raises(RequestError, match="given True; allowed: auto or off"):
        load_config(path, ["run.cuda_graphs=on"])


def test_keys_that_may_change_exist(path: Path) -> None:
    every = load_config(path).model_dump()
    assert {key for key in MAY_CHANGE_ON_RESUME if key.split(".")[1] not in every[key.split(".")[0]]} == set()


@pytest.mark.parametrize(("name", "said"), [("RAdam", "torch.optim:RAdam"), ("adafactor", "torch.optim:Adafactor")])
def test_an_optimizer_that_users_know_is_answered_with_its_class(tmp_path: Path, name: str, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"data: {{store: s, size_px: 64}}\nrun: {{dir: r, steps: 1}}\noptimizer: {{name: {name}}}\n")
    with pytest.raises(RequestError, match=said):
        load_config(path)
