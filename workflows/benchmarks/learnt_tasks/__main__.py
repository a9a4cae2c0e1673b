"""Benchmark of tasks on drawn slides: each task's metric after `hyfi train`, the best possible one, and their ratio.

    python -m workflows.benchmarks.learnt_tasks [--train 128] [--val 64] [--test 96] [--epochs 32] [--only cox …]

Labels, grades, numbers and times are drawn with noise from areas of discs on the slides. Nothing can predict them
better than these areas do: their metric, on the same test slides, is what the truth allows. The ratio is that of both
metrics after chance is subtracted: 0.5 for AUROC and concordance, 0 for the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from workflows.benchmarks.learnt_tasks.drawing import draw_archive
from workflows.benchmarks.learnt_tasks.truth import metrics_of_truth

IMAGE_PX, MPP_UM, BATCH = 128, 4.0, 16


@dataclass(frozen=True)
class LearntTask:
    """A task as its YAML asks for it, and the metrics by which it is judged.

    Attributes:
        data: Keys of ``data``.
        metrics: Names of the metrics in the JSON of ``hyfi validate``; with several targets, after a target's name and
            a dot.
        model: Keys of ``model``.
    """

    data: dict[str, Any]
    metrics: tuple[str, ...]
    model: dict[str, Any] = field(default_factory=dict)

    def config(self, epochs: int) -> dict[str, Any]:
        """Return the configuration of a run."""
        images = {"size_px": IMAGE_PX, "mpp": MPP_UM, "batch_size": BATCH, "augment": {"flips": True}, "align_px": 32}
        return {
            "data": {"store": "store", **images, **self.data},
            "model": {"name": "resnet6", "pool": "avg", "norm": "train", "options": {"width": 16}, **self.model},
            "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 1e-2, "max_norm": 1.0},
            "lr_schedule": {"name": "cosine", "warmup_steps": 10},
            "validation": {"every_steps": 32},
            "run": {"epochs": epochs, "seed": 0, "tensorboard": False},
        }


CHANCE = {"auroc": 0.5, "quadratic_kappa": 0.0, "r2": 0.0, "concordance": 0.5}
"""Values of the metrics for predictions that know nothing."""
_LABELS, _NUMBERS = {"task": "multilabel", "target": ["blue", "brown"]}, {"task": "regression", "target": "number"}
_GRADES, _TIMES = {"task": "ordinal", "target": "grade"}, {"task": "survival", "target": ["months", "died"]}
_TARGETS = [
    {**_GRADES, "name": "grade", "loss": "cumulative_link"},
    {**_NUMBERS, "name": "number"},
    {**_TIMES, "name": "time"},
]
TASKS = {
    "multilabel": LearntTask(_LABELS, ("auroc",)),
    "corn": LearntTask({**_GRADES, "loss": "corn"}, ("quadratic_kappa",)),
    "cumulative_link": LearntTask({**_GRADES, "loss": "cumulative_link"}, ("quadratic_kappa",)),
    "regression": LearntTask(_NUMBERS, ("r2",)),
    "cox": LearntTask({**_TIMES, "loss": "cox"}, ("concordance",)),
    "hazards": LearntTask({**_TIMES, "loss": "hazards", "time_bins": 4}, ("concordance",)),
    "several": LearntTask({"targets": _TARGETS}, ("grade.quadratic_kappa", "number.r2", "time.concordance")),
}


def hyfi(folder: Path, *words: object) -> str:
    """Run ``hyfi`` with these words in ``folder`` and return its output; exit with all of its output if it fails."""
    command = [sys.executable, "-m", "workflows", *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"hyfi {' '.join(map(str, words))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def learnt(folder: Path, name: str, epochs: int) -> dict[str, Any]:
    """Train a task and return the metrics of its best checkpoint on the test slides."""
    config = TASKS[name].config(epochs)
    config["run"]["dir"] = name
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    hyfi(folder, "train", f"{name}.yaml")
    checkpoint = f"{name}/checkpoints/best"
    metrics: dict[str, Any] = json.loads(
        hyfi(folder, "validate", checkpoint, "--store", "store", "--json").splitlines()[-1]
    )
    return metrics


def row_of(name: str, metric: str, metrics: dict[str, Any], truths: dict[str, float]) -> str:
    """Return the row of a task's metric in the table, without its seconds; undefined values are ``-``.

    Args:
        name: Name of the task.
        metric: Name of the metric; with several targets, after a target's name and a dot.
        metrics: The metrics that the trained network reached, and under ``intervals`` their confidence intervals.
        truths: The best possible value of each metric, by its name without a target.
    """
    reached, interval = metrics[metric], metrics["intervals"][metric]
    without_target = metric.rpartition(".")[2]
    best, chance = truths[without_target], CHANCE[without_target]
    reached_text = "-" if reached is None else f"{reached:.3f}"
    interval_text = "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
    # Chance is subtracted, since a network with an AUROC of 0.5 has learnt nothing.
    ratio_text = "-" if reached is None else f"{(reached - chance) / (best - chance):.2f}"
    return f"{name:<16} {metric:<21} {reached_text:>7} {interval_text:>16} {best:>7.3f} {ratio_text:>6}"


def main() -> None:
    """Draw, ingest, and print a row for each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for split, count in (("train", 128), ("val", 64), ("test", 96)):
        parser.add_argument(f"--{split}", type=int, default=count, metavar="SLIDES")
    parser.add_argument("--epochs", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        counts = {split: getattr(args, split) for split in ("train", "val", "test")}
        labels, splits = draw_archive(folder, counts, args.seed)
        hyfi(folder, "ingest", "manifest.csv", "--out", "store", "--mpp", MPP_UM)
        truth = metrics_of_truth(labels, np.flatnonzero(np.array(splits) == "test"))
        print(f"slides: {counts}, {labels.died.mean():.0%} of the times end with the event", flush=True)
        print(
            f"{'task':<16} {'metric':<21} {'learnt':>7} {'95 % interval':>16} {'truth':>7} {'ratio':>6} {'s':>5}",
            flush=True,
        )
        for name in args.only:
            start_s = time.perf_counter()
            metrics = learnt(folder, name, args.epochs)
            seconds = time.perf_counter() - start_s
            for metric in TASKS[name].metrics:
                print(f"{row_of(name, metric, metrics, truth)} {seconds:>5.0f}", flush=True)


if __name__ == "__main__":
    main()
