"""Benchmark of the machine model: published figures compared with forecasts, with one set of parameters.

    python -m workflows.benchmarks.headlines [--only PATTERN] [--json FILE]

Efficiencies and overheads are those of ``v100-lassen.yaml`` and ``p40.yaml``, the same in both: no point is fitted
separately. Prints a table of all points with their errors, the number of points within 10 % (with stated and with
assumed settings), and the fastest of our plans for some published networks and sizes. Nothing is trained; networks are
captured without memory for their images.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from workflows.benchmarks.headlines.ahead import print_ahead
from workflows.benchmarks.headlines.forecasts import Forecasts
from workflows.benchmarks.headlines.points import NOT_MODELLED, Point, points

_CLOSE = 0.1


@dataclass(frozen=True)
class _Row:
    point: Point
    modelled: float

    @property
    def error(self) -> float:
        return self.modelled / self.point.published - 1.0


def main() -> None:
    """Print published and modelled figures with the errors, what is not modelled, and then the forecasts ahead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern of sources, as in 'torch*'; 'ahead' for the last table")
    parser.add_argument("--json", type=Path, help="file for the rows of the first table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    forecasts = Forecasts()
    rows = []
    print(f"{'source':<11} {'quantity':<20} {'published':>9} {'modelled':>9} {'error':>6}  setting")
    for point in points():
        if fnmatch.fnmatch(point.source, args.only):
            rows.append(_Row(point, point.modelled(forecasts)))
            print(_line(rows[-1]), flush=True)
    for line in _summary(rows):
        print(line)
    for figure, why in NOT_MODELLED.items() if args.only == "*" else ():
        print(f"not modelled: {figure}: {why}")
    if args.json is not None:
        args.json.write_text(json.dumps([_as_json(row) for row in rows], indent=1), encoding="utf-8")
    if fnmatch.fnmatch("ahead", args.only):
        print_ahead(forecasts)


def _line(row: _Row) -> str:
    point = row.point
    return (
        f"{point.source:<11} {point.what:<20} {point.published:>9.4g} {row.modelled:>9.4g} {row.error:>+6.0%}  "
        f"{point.setting}"
    )


def _summary(rows: list[_Row]) -> list[str]:
    """Return a line about the errors of points with stated settings, and one of those with assumed ones."""
    lines = []
    for stated, name in ((True, "stated"), (False, "assumed")):
        errors = [abs(row.error) for row in rows if row.point.stated == stated]
        if errors:
            close = sum(error <= _CLOSE for error in errors)
            lines.append(
                f"{name} settings: {close} of {len(errors)} points within {_CLOSE:.0%}, median error "
                f"{statistics.median(errors):.1%}, largest {max(errors):.0%}"
            )
    return lines


def _as_json(row: _Row) -> dict[str, object]:
    return {**vars(row.point), "modelled": row.modelled}


if __name__ == "__main__":
    main()
