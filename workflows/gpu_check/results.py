"""Results of a check: the results of its parts, as one JSON file and as one page of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["passed", "failed", "stopped", "not run"]
_WIDTH = 120


@dataclass(frozen=True)
class PartResult:
    """The result of a part.

    Attributes:
        part: Name of the part.
        outcome: How it ended; "stopped": its time was up, and earlier rows are kept.
        reason: Why it has not passed; empty if it has.
        seconds: Duration.
        rows: The measurements: "what" and figures; "failed" has the reason if a measurement failed.
    """

    part: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    rows: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


def as_json(machine: Mapping[str, Any], results: Sequence[PartResult]) -> dict[str, Any]:
    """Return all results for the JSON file."""
    return {"machine": dict(machine), "parts": [asdict(result) for result in results]}


def as_text(machine: Mapping[str, Any], results: Sequence[PartResult]) -> str:
    """Return all results as a page of text."""
    lines = [", ".join(f"{key} {value}" for key, value in machine.items())]
    if not machine.get("gpus"):
        lines.append("no GPU: the parts ran their code on the processor, at tiny sizes; times and memory mean nothing")
    lines.append("")
    for result in results:
        head = f"{result.outcome:8} {result.part} ({result.seconds:.0f} s)"
        lines.append(f"{head}: {result.reason}" if result.reason else head)
        lines += [f"         {_row_text(row)}"[:_WIDTH] for row in result.rows]
    counts = {name: sum(result.outcome == name for result in results) for name in ("passed", "failed", "stopped")}
    lines += ["", ", ".join(f"{count} {name}" for name, count in counts.items())]
    return "\n".join(lines) + "\n"


def _row_text(row: Mapping[str, Any]) -> str:
    texts = [f"{key} {_value_text(key, value)}" for key, value in row.items() if key not in ("what", "passed")]
    verdict = "" if row.get("passed", True) else "NOT as expected: "
    return f"{row.get('what', '')}: {verdict}{', '.join(texts)}"


def _value_text(key: str, value: object) -> str:
    if isinstance(value, (int, float)) and key.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    if isinstance(value, float):
        return f"{value:.3f} s" if key.endswith("_s") else f"{value:.3g}"
    return str(value)
