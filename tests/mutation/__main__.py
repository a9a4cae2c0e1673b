"""``python -m tests.mutation --seed 0 --each 10``: whether the nearest tests notice faults in a sample of the code."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from tests.mutation.covering import Covering
from tests.mutation.survivors import outcomes, sample, used_s

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Print what the tests say of each mutant, and the fraction that they notice in each package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--each", type=int, default=10, help="mutants of each package")
    parser.add_argument("--minutes", type=float, default=20.0, help="of processor time, at most")
    parser.add_argument(
        "--covering", type=Path, nargs="+", help="which tests run each line, from tests.mutation.covering"
    )
    asked = parser.parse_args()
    killed, tried = Counter[str](), Counter[str]()
    covering = Covering.read(asked.covering) if asked.covering else None
    for outcome in outcomes(ROOT, sample(ROOT, asked.seed, asked.each), 60 * asked.minutes, covering):
        package = "/".join(outcome.mutant.path.split("/")[:2])
        tried[package] += 1
        killed[package] += outcome.killed
        what = "killed by" if outcome.killed else "SURVIVES"
        print(f"{what} {outcome.by}\n    {outcome.mutant}", flush=True)
    for package, count in tried.items():
        print(f"{package}: {killed[package]} of {count}")
    share = killed.total() / max(1, tried.total())
    print(
        f"{killed.total()} of {tried.total()} mutants killed ({share:.1%}) in {used_s() / 60:.1f} minutes of one core"
    )


if __name__ == "__main__":
    main()
