"""Benchmark of two checkouts of this project: whether a change made steps slower, or larger in memory.

    python -m workflows.benchmarks.trees CHECKOUT [--only engine cells] [--pairs 30] [--rounds 2]

Each checkout works in a process of its own, and both stay alive on one core: they take single steps in turns, A B B A,
so that whatever else the machine does slows both sides of a pair. Times are of the processor, one thread each. Prints a
JSON line for each kind of work: median seconds of a step, the median of the ratios of all pairs (this checkout to the
other) with an interval that has their median in 95 of 100 runs, the median of each round, the ratio of the
shortest steps (median of all rounds), and by how many MB the process grew at its peak, the least of all rounds. Every
round has new processes, since two of the same code differ, too. ``CHECKOUT`` compared with itself (``--this CHECKOUT``)
shows what the machine can tell.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from workflows.benchmarks.trees.work import WORK

_HERE = Path(__file__).parents[3]
_MB = 1e6


def main() -> None:
    """Print, for each kind of work, a line of JSON that compares the two checkouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the other checkout, such as a git worktree of an earlier commit")
    parser.add_argument("--this", type=Path, default=_HERE, help="instead of this checkout")
    parser.add_argument("--only", nargs="+", choices=sorted(WORK), default=list(WORK))
    parser.add_argument("--pairs", type=int, default=30, help="of steps, in each round")
    parser.add_argument("--rounds", type=int, default=2, help="new processes for both")
    parser.add_argument("--size", type=int, default=256, help="side of an image in pixels")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        if "loader" in args.only:
            _draw(Path(folder) / "slides", store, 4 * args.size)
        for kind in args.only:
            sizes = [kind, str(args.size), str(store)]
            rounds = [
                compare((args.this.resolve(), args.checkout.resolve()), sizes, args.pairs) for _ in range(args.rounds)
            ]
            print(json.dumps({"work": kind, **summary(rounds)}), flush=True)


def compare(
    checkouts: tuple[Path, Path], words: Sequence[str], pairs: int
) -> tuple[list[tuple[float, float]], tuple[int, int]]:
    """Return the processor seconds of each pair of steps, and by how many bytes each process had grown at its peak.

    Both are pairs in the order of ``checkouts``.
    """
    sides = [_Side(checkout, words) for checkout in checkouts]
    seconds = []
    for pair in range(pairs):
        # In the order A B B A, a steady drift of the machine, such as of its clock rate, cancels out.
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        steps = {index: sides[index].step() for index in order}
        seconds.append((steps[0], steps[1]))
    return seconds, (sides[0].end(), sides[1].end())


def summary(rounds: Sequence[tuple[list[tuple[float, float]], tuple[int, int]]]) -> dict[str, object]:
    """Return the line to print of one kind of work: ``rounds`` has a result of `compare` for each round."""
    pairs = [pair for seconds, _ in rounds for pair in seconds]
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    # The interval of the sign test: the number of ratios below their true median is binomial, about normal, with a mean
    # of n / 2 and a deviation of √n / 2. 95 % are within 1.96 deviations.
    half_width = 0.98 * math.sqrt(len(ratios))
    low = max(0, math.floor(len(ratios) / 2 - half_width))
    high = min(len(ratios) - 1, math.ceil(len(ratios) / 2 + half_width))
    # Of a process, the shortest step counts, as other work of the machine only adds time. Of the rounds, the median
    # counts: where a new process happens to have its memory makes all of its steps faster or slower.
    shortest = [statistics.median(min(pair[side] for pair in seconds) for seconds, _ in rounds) for side in (0, 1)]
    # The least growth counts: more is chance, e.g. memory that is returned to the system later.
    grown = [min(peaks[side] for _, peaks in rounds) for side in (0, 1)]
    return {
        "seconds": [round(statistics.median(pair[side] for pair in pairs), 4) for side in (0, 1)],
        "ratio": round(statistics.median(ratios), 4),
        "interval": [round(ratios[low], 4), round(ratios[high], 4)],
        "of_rounds": [round(statistics.median(a / b for a, b in seconds), 4) for seconds, _ in rounds],
        "shortest_ratio": round(shortest[0] / shortest[1], 4),
        "grown_mb": [round(each / _MB, 1) for each in grown],
        "grown_ratio": round(grown[0] / grown[1], 4) if grown[1] else None,
    }


class _Side:
    """A process that works with the packages of one checkout."""

    def __init__(self, checkout: Path, words: Sequence[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        # -P: without it, Python puts the folder of the script, of this checkout, before the other's packages.
        command = [sys.executable, "-P", str(Path(__file__).with_name("work.py")), str(checkout), *words]
        self._process = subprocess.Popen(
            command, env=environment, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()  # it has taken its first steps

    def step(self) -> float:
        """Take a step; return the processor seconds of all threads."""
        return float(self._ask("step"))

    def end(self) -> int:
        """End the process; return the bytes by which it grew at its peak."""
        grown_bytes = int(self._ask("end"))
        self._process.wait()
        return grown_bytes

    def _ask(self, word: str) -> str:
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the process of {self._process.args!r} ended with code {self._process.wait()}")
        return line


def _draw(slides: Path, store: Path, size_px: int) -> None:
    """Draw a slide and ingest it: both checkouts read the same store."""
    from pathology.ingest.archive import Request, ingest
    from pathology.ingest.options import IngestOptions
    from pathology.synthetic.archive import lay_out_archive, make_archive

    make_archive(lay_out_archive(1, size_px, 0), slides, workers=1)
    ingest(Request(sorted(slides.glob("*.tif*")), store, IngestOptions(native=True)))


if __name__ == "__main__":
    main()
