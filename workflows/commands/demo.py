"""``hyfi demo``: runs the commands of a whole project on a small synthetic archive.

synth ─► slides/ ─► ingest (train, val) ─► store/ ─► train ─► run/ ─┐
            └───────────── test slides, as files ───────────────► predict ─► predictions/
"""

from __future__ import annotations

import csv
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyfi_core.errors import RequestError
from workflows.console import emit_json, say
from workflows.own_command import run_command

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.yaml"
MARKER = ".hyfi-demo"
SECONDS_TO_STOP = 30.0


@dataclass(frozen=True)
class Archive:
    """Parameters of the demo's slides; those of the training are in the recipe."""

    slides: int = 110
    size_px: int = 2048
    seed: int = 7
    mpp_um: float = 1.0
    target: str = "label"
    positive: str = "malignant"


class StageError(Exception):
    """A command of the demo returned an exit code other than 0."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"hyfi {name} ended with exit code {code}")
        self.code = code


def run(out: Path, as_json: bool, archive: Archive | None = None, overrides: Sequence[str] = ()) -> int:
    """Run all commands of the demo in ``out``; an interrupted demo is continued, a finished one is run again.

    Args:
        out: Folder for all output.
        as_json: Print the summary as one JSON object at the end.
        archive: Parameters of the slides; default: those of ``Archive``.
        overrides: ``section.key=value`` for training, applied to the recipe.

    Returns:
        0, or the exit code of the first command that did not return 0.

    Raises:
        RequestError: ``out`` exists and was not written by the demo.
    """
    archive = archive or Archive()
    parameters = {"archive": asdict(archive), "recipe": RECIPE.read_text(), "overrides": list(overrides)}
    _prepare(out, parameters)
    demo = _Demo(out, archive, overrides)
    try:
        for name, stage in demo.stages.items():
            demo.timed(name, stage)
        summary = demo.summary()
    except StageError as error:
        say(f"hyfi demo: {error}; the same command continues from there")
        return error.code
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    _mark(out, parameters, finished=True)
    _print(summary)
    if as_json:
        emit_json(summary)
    return 0


def _prepare(out: Path, parameters: dict[str, Any]) -> None:
    """Create ``out`` with a marker; its content stays only if it is an unfinished demo with the same parameters."""
    if out.exists() and not (out / MARKER).exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(f"{out} exists and was not written by hyfi demo; choose another --out, or remove the folder")
    if (out / MARKER).exists():
        before = json.loads((out / MARKER).read_text())
        if before["done"] or before["parameters"] != parameters:
            # Rename before removing: a partly removed folder must not be taken for an unfinished demo.
            former = out.with_name(f".{out.name}.old")
            shutil.rmtree(former, ignore_errors=True)
            out.rename(former)
            shutil.rmtree(former)
    out.mkdir(parents=True, exist_ok=True)
    _mark(out, parameters, finished=False)


def _mark(out: Path, parameters: dict[str, Any], finished: bool) -> None:
    """Write the marker: the demo wrote this folder, with these parameters, and whether it is finished."""
    temporary = out / f"{MARKER}.tmp"
    temporary.write_text(json.dumps({"done": finished, "parameters": parameters}))
    # Atomic, because a later call could not parse half a marker.
    temporary.replace(out / MARKER)


class _Demo:
    """The commands of the demo, their folders, and the seconds that each took."""

    def __init__(self, out: Path, archive: Archive, overrides: Sequence[str]) -> None:
        self.archive, self.overrides = archive, overrides
        self.slides, self.store, self.run = out / "slides", out / "store", out / "run"
        self.predictions = out / "predictions"
        self.seconds: dict[str, float] = {}
        self.stages: dict[str, Callable[[], None]] = {
            "synth": self.synth,
            "ingest": self.ingest,
            "train": self.train,
            "predict": self.predict,
        }

    def timed(self, name: str, stage: Callable[[], None]) -> None:
        """Run a command, and note and print how many seconds it took."""
        began_s = time.monotonic()
        stage()
        self.seconds[name] = round(time.monotonic() - began_s, 1)
        say(f"  {name}: {self.seconds[name]} s\n")

    def synth(self) -> None:
        # `synth` writes its manifest last.
        if (self.slides / "manifest.csv").exists():
            return
        shutil.rmtree(self.slides, ignore_errors=True)
        archive = self.archive
        _hyfi("synth", self.slides, "--slides", archive.slides, "--size", archive.size_px, "--seed", archive.seed)

    def ingest(self) -> None:
        """Ingest the slides of train and val; the test slides are predicted from their files."""
        rows = _rows(self.slides / "manifest.csv")
        manifest = self.slides / "training.csv"
        with manifest.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(row for row in rows if row["split"] != "test")
        _hyfi("ingest", manifest, "--out", self.store, "--mpp", self.archive.mpp_um)

    def train(self) -> None:
        settings = [f"data.store={_yaml(self.store)}", f"run.dir={_yaml(self.run)}", *self.overrides]
        _hyfi("train", RECIPE, *settings, "--resume")

    def predict(self) -> None:
        best = self.run / "checkpoints" / "best"
        _hyfi("predict", best, *(self.slides / row["path"] for row in self.held_out()), "--out", self.predictions)

    def held_out(self) -> list[dict[str, str]]:
        return [row for row in _rows(self.slides / "manifest.csv") if row["split"] == "test"]

    def summary(self) -> dict[str, Any]:
        """Return the metrics of the held-out slides, the report of the surest positive, and seconds by command."""
        import torch

        from workflows.tasks.class_metrics import metrics_of_probabilities

        column = f"p_{self.archive.positive}"
        predicted = {row["slide_id"]: row for row in _rows(self.predictions / "predictions.csv")}
        pairs = [(row, predicted[row["slide_id"]]) for row in self.held_out()]
        positive = torch.tensor([float(prediction[column]) for _, prediction in pairs], dtype=torch.float64)
        targets = torch.tensor([row[self.archive.target] == self.archive.positive for row, _ in pairs]).long()
        metrics = metrics_of_probabilities(torch.stack([1 - positive, positive], dim=1), targets)
        # Targets are 0 or 1: the sum is larger for a positive slide than for any negative one.
        clearest = pairs[int((positive + targets).argmax())][0]["slide_id"]
        return {
            "held_out_slides": len(pairs),
            "metrics": metrics,
            "seconds": self.seconds,
            "predictions": str(self.predictions / "predictions.csv"),
            "report": str(self.predictions / clearest / "report.html"),
        }


def _hyfi(*arguments: object) -> None:
    """Run one command as a user would; on Ctrl-C, stop it and wait for its end."""
    code = run_command(arguments, SECONDS_TO_STOP)
    if code != 0:
        raise StageError(str(arguments[0]), code)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _yaml(path: Path) -> str:
    """Return a path as a YAML value, quoted if YAML would read it as something else."""
    import yaml

    # A folder named `1e3` or `no` would be read as a number or a boolean.
    return str(path) if yaml.safe_load(str(path)) == str(path) else json.dumps(str(path))


def _print(summary: dict[str, Any]) -> None:
    """Print the results of the demo."""
    metrics = ", ".join(
        f"{name} {'undefined' if value is None else format(value, '.3f')}" for name, value in summary["metrics"].items()
    )
    say(f"{summary['held_out_slides']} held-out slides: {metrics}")
    say(f"all predictions: {summary['predictions']}")
    say(f"report: {summary['report']}")
