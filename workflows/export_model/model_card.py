"""``README.md`` of an exported model: what it predicts, its training slides, its metrics, and its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from data.samples.colours.stain_normalisation import StainNormalisation
from data.samples.trained.trained_slides import TrainedSlides
from workflows.export_model.exported import ExportSource
from workflows.training.metrics_log import MetricsLine, read_metrics

FILE_NAME = "README.md"


def write_card(source: ExportSource, checkpoint: Path, folder: Path, files: Sequence[tuple[str, str]]) -> None:
    """Write ``README.md`` of an export: its files, the model, its input, its slides, its metrics.

    Args:
        source: The checkpoint.
        checkpoint: Its folder; if it still lies in its run, the card has the run's metrics.
        folder: Folder of the exported files.
        files: (name, description) of each file.
    """
    config = source.config
    parts = [
        f"# {config['model']['name']}: {config.get('task', 'multiclass')}",
        "",
        *_table("Files", ("file", "what"), files),
        *_table("Model", ("", ""), _model(source, checkpoint)),
        *_table("Images", ("", ""), _images(source)),
        *_table("Training slides", ("", ""), _training(config)),
        *_metrics(checkpoint, config),
        "## Limits",
        "",
        "- Metrics are those of the slides named above; other scanners, stains and patients may differ. Validate on "
        "your own slides before use: `hyfi validate CHECKPOINT --store STORE --labels LABELS.csv --split all`.",
        "- An image must show tissue at the stated micrometres per pixel; background and pen are seen as they are.",
        "- For research. It is not a medical device.",
        "",
        *_table("Made with", ("", ""), sorted((str(k), str(v)) for k, v in config.get("versions", {}).items())),
    ]
    (folder / FILE_NAME).write_text("\n".join(parts), encoding="utf-8")


def _table(title: str, columns: tuple[str, str], rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return a section with a table of two columns; nothing without rows."""
    if not rows:
        return []
    lines = [f"| {_cell(key)} | {_cell(value)} |" for key, value in rows]
    return [f"## {title}", "", f"| {columns[0]} | {columns[1]} |", "|---|---|", *lines, ""]


def _cell(text: str) -> str:
    """Return a text that stays in one cell of a table: no line break, no bar."""
    return text.replace("\n", " ").replace("|", "\\|")


def _predicted(config: Mapping[str, Any]) -> str:
    """Return the task and its columns as text, for each target if there are several."""
    if "targets" in config:
        return "; ".join(f"{entry['name']}: {_predicted(entry)}" for entry in config["targets"])
    target = config.get("target", "label")
    columns = [target] if isinstance(target, str) else list(target)
    named = ", ".join(map(repr, columns))
    return f"{config.get('task', 'multiclass')} from the column{'s' * (len(columns) > 1)} {named}"


def _model(source: ExportSource, checkpoint: Path) -> list[tuple[str, str]]:
    """Return the (name, text) rows about the model and its weights."""
    config = source.config
    rows = [
        ("predicts", _predicted(config)),
        ("outputs, in order", ", ".join(map(str, config["class_names"]))),
        ("weights", f"{sum(parameter.numel() for parameter in source.member.model.parameters()):,}"),
        ("SHA-256 of the weights", source.member.digest),
        ("checkpoint", f"{checkpoint.name}, step {config.get('step', 'unknown')}"),
    ]
    if source.temperature is not None:
        rows.append(("probabilities", f"softmax of outputs / {source.temperature:.4g}"))
    if source.member.averaged:
        rows.append(("average", "the weights are the average of the trained weights, which was validated"))
    return rows


def _images(source: ExportSource) -> list[tuple[str, str]]:
    """Return the (name, text) rows about the model's input: features, tiles or whole images."""
    config, scaling = source.config, source.normalisation
    normalisation = f"(pixel / 255 − {list(scaling.mean)}) / {list(scaling.std)}"
    if config.get("features"):
        stated = config["features"]
        return [
            ("features", f"{stated['length']} numbers of {stated['encoder'] or 'an encoder that was not stated'}"),
            ("size of a tile", "unknown" if stated["tile_um"] is None else f"{stated['tile_um']:.4g} µm"),
        ]
    if config.get("tiles"):
        tiles = config["tiles"]
        return [
            ("micrometres per pixel", f"{config['mpp']:g}"),
            (
                "tiles",
                f"{tiles['size_px']} px, {tiles['stride_px']} px apart, of at least {tiles['min_tissue']:.0%} tissue",
            ),
            ("normalisation", normalisation),
            *_stain(config),
        ]
    return [
        ("micrometres per pixel", f"{config['mpp']:g}"),
        ("size in training", " × ".join(map(str, config["size_px"])) + f" px, multiples of {source.align_px}"),
        ("view", str(config["view"])),
        ("normalisation", normalisation),
        *_stain(config),
    ]


def _stain(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the (name, text) row about stain normalisation, which an exported model does not do; none without it."""
    stain = StainNormalisation.from_json(config.get("stain_normalisation"))
    return [] if stain is None else [("stain normalisation", f"{stain}; must precede the model, which does not do it")]


def _training(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the (name, text) rows about the slides that the model was trained on: numbers of slides and cases."""
    if config.get("trained_on") is None:
        return [("slides", "unknown")]
    trained = TrainedSlides.of_json(config["trained_on"])
    return [("slides", str(len(trained.slides))), ("cases", str(len(trained.cases)) if trained.cases else "unknown")]


def _metrics(checkpoint: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the section with the metrics of the checkpoint's step, from the run that has the checkpoint."""
    path = checkpoint.resolve().parent.parent / "metrics.jsonl"
    records: list[MetricsLine] = []
    with suppress(OSError):  # a card is written all the same
        records = read_metrics(path)
    validations = [
        record for record in records if record.get("kind") == "validation" and record.get("step") == config.get("step")
    ]
    if not validations:
        unknown = "Not known: the checkpoint does not lie in its run, or its step was not validated."
        return ["## Metrics", "", unknown, ""]
    last = validations[-1]
    intervals: Mapping[str, Any] = last.get("intervals") or {}
    rows = [
        (name, _value(value) + _interval(intervals, name))
        for name, value in last.items()
        if isinstance(value, float) and name not in ("seconds", "time")
    ]
    slides = f"{last.get('slides', '?')} slides of the validation split, by which the checkpoint may have been chosen"
    return [*_table("Metrics", ("metric", f"value (95 % interval), {slides}"), rows)]


def _value(value: float) -> str:
    return f"{value:.4f}"


def _interval(intervals: Mapping[str, Any], name: str) -> str:
    """Return the interval of a metric in brackets; empty if the metric has none."""
    if name not in intervals:
        return ""
    interval = intervals[name]
    if interval is None or None in interval:
        return " (interval undefined)"
    return f" ({_value(interval[0])} to {_value(interval[1])})"
