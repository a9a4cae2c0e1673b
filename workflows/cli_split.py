"""The options of ``hyfi split``; implemented in :mod:`workflows.commands.split`."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from hyfi_core.errors import RequestError
from workflows import signals
from workflows.cli_options import Json, MergeAlike, Resume
from workflows.exit_codes import exit_code_of
from workflows.paths import require_replaceable

Labels = Annotated[Path, typer.Argument(metavar="LABELS.csv", help="One row for each slide.")]
Out = Annotated[Path, typer.Option("--out", help="The CSV file to write.")]
Folds = Annotated[int | None, typer.Option("--folds", min=2, help="Number of cross-validation folds.")]
Group = Annotated[str, typer.Option("--group", help="Column to group by: no value is in two splits.")]
Stratify = Annotated[str | None, typer.Option("--stratify", help="Columns to balance over the splits, or none.")]
Fractions = Annotated[
    str | None,
    typer.Option("--fractions", metavar="TRAIN,VAL,TEST", help="Shares of the splits, as in 0.7,0.1,0.2."),
]
FixedTest = Annotated[
    str | None,
    typer.Option("--fixed-test", metavar="COLUMN=VALUE", help="Rows to use as the test set, as in site=Leeds."),
]
Repeats = Annotated[
    int, typer.Option("--repeats", min=1, help="How often to draw folds; further ones are in columns repeat_1 …")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same splits.")]
Store = Annotated[
    Path | None,
    typer.Option("--store", help="The store with the slides; slides with the same content then stay in one split."),
]
IdColumn = Annotated[str | None, typer.Option("--id-column", help="Column of the slides' names; default: slide_id.")]
Missing = Annotated[
    str | None,
    typer.Option(
        "--missing",
        metavar="WORDS",
        help="Words that mean that a value is missing, as in 'NA,unknown'; default: NA, nan, None, unknown, - …",
    ),
]


def split(
    labels: Labels,
    out: Out,
    folds: Folds = None,
    group: Group = "case_id",
    stratify: Stratify = None,
    seed: Seed = 0,
    store: Store = None,
    merge_alike: MergeAlike = False,
    missing: Missing = None,
    id_column: IdColumn = None,
    fractions: Fractions = None,
    fixed_test: FixedTest = None,
    repeats: Repeats = 1,
    resume: Resume = False,  # changes nothing: accepted as in `hyfi train`
    as_json: Json = False,
) -> None:
    """Divide slides into train, val and test, or into folds; no case in two of them."""

    def prepare() -> None:
        signals.interrupt_on_request()
        require_replaceable(out, lambda start: _is_splits(start, group), f"a table of splits by {group}")
        _require_other_file(labels, out)

    def body() -> int:
        from workflows.commands.split import SplitOptions, run
        from workflows.option_values import parse_fractions

        return run(
            labels,
            out,
            folds,
            group,
            stratify,
            seed,
            as_json,
            store=store,
            merge_alike=merge_alike,
            missing=missing,
            options=SplitOptions(id_column, parse_fractions(fractions), fixed_test, repeats),
        )

    raise typer.Exit(exit_code_of(body, prepare))


def _require_other_file(labels: Path, out: Path) -> None:
    """Check that the table that is read is not replaced: it may have splits that someone else has made.

    Raises:
        RequestError: Both are one file.
    """
    with suppress(OSError):  # one of them is not there, or cannot be read: reported later
        if out.samefile(labels):
            raise RequestError(f"--out {out} is the table that is read: its splits would be lost; choose another path")


def _is_splits(start: bytes, group: str) -> bool:
    """Whether a file starts like one that this command writes for groups of the column ``group``."""
    # Other columns, such as labels, would be lost.
    names = {name.strip('"') for name in start.splitlines()[0].decode("utf-8-sig", "replace").split(",")}
    own = {name for name in names if re.fullmatch(r"split(_[0-9]+)?|fold|repeat_[0-9]+", name)}
    return bool(own & {"split", "fold"}) and names - own <= {"slide_id", "case_id", group}
