"""``hyfi split``: divides the slides of a labels CSV into splits or folds, with whole cases in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.csv_table import KEYS, Table, read_table, write_table
from data.location import location
from data.missing import MISSING
from data.samples.assign import assign_groups
from data.samples.classes import column_of_classes
from data.samples.matching import absent_notes
from data.samples.names import (
    AgreedCases,
    cases_of,
    column_in_one_way,
    with_one_name_each,
    with_one_spelling_of_cases,
    without_missing,
)
from data.samples.splits import SPLITS
from data.samples.strata import fixed_groups, is_numbers, strata_of
from data.store.manifest import load_manifest, same_content
from hyfi_core.errors import RequestError
from workflows import console

TARGET, TEST, NOTHING = "label", "test", "none"
SHARES: Mapping[str, float] = {"train": 0.7, "val": 0.15, "test": 0.15}


@dataclass(frozen=True)
class SplitOptions:
    """Further options of splits.

    Attributes:
        id_column: The column with the names of the slides; None: ``slide_id``.
        fractions: Shares of train, val and test, 0 or more; None: 70 : 15 : 15.
        fixed_test: ``COLUMN=VALUE,VALUE``: rows with these values are the test set; the other rows are divided.
        repeats: How often folds are drawn; the columns ``repeat_1``, ``repeat_2`` … have the folds of further seeds.
    """

    id_column: str | None = None
    fractions: Sequence[float] | None = None
    fixed_test: str | None = None
    repeats: int = 1

    def shares(self, folds: int | None) -> Mapping[str, float]:
        """Return part -> share: ``{"train": 0.7, "val": 0.15, "test": 0.15}``, or ``{"0": 1.0, "1": 1.0}`` for 2 folds.

        Raises:
            RequestError: The options contradict each other, or fractions are not three shares of train, val and test.
        """
        if folds is not None:
            if self.fractions is not None:
                raise RequestError("--fractions: not with --folds, which all have the same size")
            return {str(fold): 1.0 for fold in range(folds)}
        if self.repeats > 1:
            raise RequestError(f"--repeats {self.repeats}: needs --folds, which are drawn several times")
        fractions = self.fractions
        if fractions is None:
            return {name: share for name, share in SHARES.items() if self.fixed_test is None or name != TEST}
        if len(fractions) != len(SPLITS) or min(fractions) < 0 or not fractions[0] > 0 or max(fractions[1:]) == 0:
            given = ",".join(f"{share:g}" for share in fractions)
            raise RequestError(f"--fractions: given {given}; allowed: those of train, val and test, as in 0.7,0.1,0.2")
        shares = dict(zip(SPLITS, fractions, strict=True))
        if self.fixed_test is not None and shares[TEST] > 0:
            raise RequestError(f"--fractions: --fixed-test {self.fixed_test} is the test set; its share must be 0")
        return {name: share for name, share in shares.items() if share > 0}


def run(
    labels: Path,
    out: Path,
    folds: int | None,
    group: str,
    stratify: str | None,
    seed: int,
    as_json: bool = False,
    *,
    store: Path | None = None,
    merge_alike: bool = False,
    missing: str | None = None,
    options: SplitOptions | None = None,
) -> int:
    """Write ``out`` with the columns ``slide_id``, ``case_id`` (those that the labels have), and ``split`` or folds.

    Without ``folds``, groups are assigned to train, val and test. With ``folds``, the column ``fold`` has 0 … K−1, and
    for each fold k a column ``split_k`` has ``val`` if the fold is k, else ``train``. So ``data.split_column=split_2``
    trains the third model of a cross-validation.

    Args:
        labels: The CSV.
        out: The CSV to write; replaced if it exists.
        folds: Number of folds; None: train, val and test.
        group: Column whose values are never in two parts; a row without a value is grouped by its case or its key.
        stratify: Columns that are balanced, with commas between: classes, or quarters of numbers; ``none``: only sizes;
            None: ``label`` if there is such a column.
        seed: Decides ties.
        as_json: Print the counts as one JSON object.
        store: A store whose names, cases and digests are used, too; slides with the same content are one group.
        merge_alike: Whether several spellings of one name are joined, see `data.spelling`.
        missing: Words that mean that a value is missing, with commas between; None: those of `data.missing`.
        options: Further options.

    Raises:
        RequestError: A column is missing, groups or names contradict each other, or ``out`` cannot be written.
    """
    if folds is not None and folds < 2:
        raise RequestError(f"--folds: given {folds}; use at least 2")
    options = options or SplitOptions()
    shares = options.shares(folds)
    table = read_table(labels, "labels", used=(group, *_columns(stratify)), id_column=options.id_column)
    balanced, balance_notes = _stratified_by(table, stratify)
    words = MISSING if missing is None else tuple(missing.split(","))
    stored = _stored_rows(store, merge_alike, words)
    table, name_notes = _in_one_way(table, stored, group, balanced, merge_alike, words)
    table, repeat_notes = _each_once(table)
    groups, content_notes = _with_same_content(table, _groups(table, group), stored or table.rows)
    notes = [*balance_notes, *name_notes, *repeat_notes, *_ungrouped(table, group), *content_notes]
    strata = strata_of(table, balanced) if balanced else [""] * len(table.rows)
    # A class that cannot be in every part is an error only if the user asked for balance by this column alone.
    strict = stratify is not None and len(balanced) == 1 and not is_numbers([row[balanced[0]] for row in table.rows])
    fixed = fixed_groups(table, groups, options.fixed_test, merge=merge_alike)  # of the test set, not divided below
    divided = [(name, stratum) for name, stratum in zip(groups, strata, strict=True) if name not in fixed]
    try:
        parts = [_drawn(divided, shares, seed + repeat, strict) for repeat in range(options.repeats)]
    except RequestError as error:
        raise RequestError(f"{labels}: {error} (groups: {group})") from error
    _write_and_report(table, out, group, groups, parts, folds, strata, shares, notes, as_json)
    return 0


def _stored_rows(store: Path | None, merge: bool, missing: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the rows of a store's manifest with one spelling of each case; none without a store."""
    rows = [] if store is None else load_manifest(location(store))
    return with_one_spelling_of_cases(rows, "store", merge=merge, missing=missing)


def _write_and_report(
    table: Table,
    out: Path,
    group: str,
    groups: Sequence[str],
    parts: Sequence[Mapping[str, str]],
    folds: int | None,
    strata: Sequence[str],
    shares: Mapping[str, float],
    notes: Sequence[str],
    as_json: bool,
) -> None:
    """Write the part of each row, and print counts and notes.

    ``parts``: for each repeat, group -> part; groups that it lacks are the fixed test set.
    """
    fixed_part = TEST if folds is None else ""  # a row of the fixed test set is in no fold
    drawn = [[part.get(name, fixed_part) for name in groups] for part in parts]
    _write(table, out, group, drawn, folds)
    for text in notes:
        console.warn(f"note: {text}")
    names = list(dict.fromkeys((*shares, *([TEST] if TEST in drawn[0] else []))))
    _report(out, drawn[0], names, groups, strata, as_json)


def _drawn(rows: Sequence[tuple[str, str]], shares: Mapping[str, float], seed: int, strict: bool) -> Mapping[str, str]:
    """Return group -> part; ``rows``: (group, stratum) of each row."""
    members: dict[str, list[str]] = {}
    for name, stratum in rows:
        members.setdefault(name, []).append(stratum)
    return assign_groups(members, shares, seed, strict=strict)


def _columns(stratify: str | None) -> list[str]:
    return [] if stratify in (None, NOTHING) else [name.strip() for name in str(stratify).split(",")]


def _stratified_by(table: Table, stratify: str | None) -> tuple[list[str], list[str]]:
    """Return (the columns to balance, notes on how they were chosen)."""
    if stratify is not None:
        return _columns(stratify), []
    if TARGET in table.columns:
        return [TARGET], [f"balanced by {TARGET}; --stratify COLUMN takes another column, --stratify none only sizes"]
    return [], ["only the sizes of the splits are balanced, not what is predicted; --stratify COLUMN balances it"]


def _in_one_way(
    table: Table,
    stored: Sequence[Mapping[str, str]],
    group: str,
    stratify: Sequence[str],
    merge: bool,
    missing: tuple[str, ...],
) -> tuple[Table, list[str]]:
    """Return the table with one spelling of every name and with the cases of a store, and notes for the user.

    Args:
        table: The labels.
        stored: Rows of the store's manifest, with each case written in one way; empty without a store.
        group: Column of the groups.
        stratify: Columns that are balanced.
        merge: Whether several spellings of one name are joined.
        missing: Words that mean that a value is missing.

    Raises:
        RequestError: A column is missing, or a name has several spellings and ``merge`` is off.
    """
    named = with_one_name_each(table, stored, merge=merge, missing=missing)
    with_cases, own_notes = _with_cases_of(named.table, stored)
    named = replace(named, table=with_cases, notes=(*named.notes, *own_notes))
    for column in stratify:
        named.table.require(column, "--stratify")
        named = without_missing(named, column, missing)
        if not is_numbers([row[column] for row in named.table.rows]):
            named = column_of_classes(named, column, merge=merge, missing=missing)
    if group not in KEYS:
        named.table.require(group, "--group")
        named = column_in_one_way(without_missing(named, group, missing), group, "name", merge=merge)
    return named.table, [*named.notes, *(absent_notes(named.table, stored) if stored else ())]


def _each_once(table: Table) -> tuple[Table, list[str]]:
    """Return (a table of slides without rows that repeat an earlier one and would count twice, a note on them)."""
    if table.key != "slide_id":  # of cases: a row for each slide of a case may be meant
        return table, []
    # Reversed: of equal rows, the first one's index is written last, and stays.
    first = {tuple(row.items()): k for k, row in reversed(list(enumerate(table.rows)))}
    kept = sorted(first.values())
    if len(kept) == len(table.rows):
        return table, []
    again = console.counted(len(table.rows) - len(kept), "repeated row")
    rows, lines = tuple(table.rows[k] for k in kept), tuple(table.lines[k] for k in kept)
    return replace(table, rows=rows, lines=lines), [f"{table.name}: {again} left out: each row of a slide counts once"]


def _with_cases_of(table: Table, rows: Sequence[Mapping[str, str]]) -> tuple[Table, tuple[str, ...]]:
    """Return (the table with the case of each slide, notes); cases of the store's ``rows`` complete its own.

    Raises:
        RequestError: A slide of the table has two cases, or the table and the store contradict each other.
    """
    own = cases_of(table)
    stored = {row["slide_id"]: row["case_id"] for row in rows if row.get("case_id")}
    if not (own or stored) or "slide_id" not in table.columns:
        return table, ()
    agreed = AgreedCases.of(stored, own, str(table.name))
    columns = table.columns if "case_id" in table.columns else (*table.columns, "case_id")
    filled = ({**row, "case_id": agreed.cases.get(row["slide_id"], "")} for row in table.rows)
    return replace(table, columns=columns, rows=tuple(filled)), agreed.notes


def _groups(table: Table, group: str) -> list[str]:
    """Return the group of each row, as ``case_id P7``: with its column, because a case and a slide may share a name.

    Raises:
        RequestError: The column is missing (except ``case_id``: then each slide is its own case), a key is empty, or a
            case has two groups.
    """
    key = table.key
    if group != "case_id" or "case_id" in table.columns:
        table.require(group, "--group")
    group_of: dict[str, str] = {}  # of each slide and case, to refuse those in two groups
    groups = []
    for line, row in zip(table.lines, table.rows, strict=True):
        if not row[key]:
            raise RequestError(f"{table.name}, line {line}: no {key}")
        # A row without the group is grouped by its case, so that slides of a patient stay together; else by its key.
        name = next(f"{k} {row[k]}" for k in (group, "case_id", key) if row.get(k))
        for item in (f"{k} {row[k]}" for k in ("slide_id", "case_id") if row.get(k)):
            if group_of.setdefault(item, name) != name:
                raise RequestError(
                    f"{table.name}, line {line}: {item} is in two groups, {group_of[item]} and {name}; see --group"
                )
        groups.append(name)
    return groups


def _ungrouped(table: Table, group: str) -> list[str]:
    """Return a note on rows without a group; empty if there are none."""
    without = sum(not row.get(group) for row in table.rows)
    if not without:
        return []
    rows = console.counted(len(table.rows), "row")
    if group not in table.columns:
        return [f"{table.name}: no column {group}: each of its {rows} is a case of its own, slides of one patient too"]
    of_cases = group not in KEYS and "case_id" in table.columns
    own = "those of a case are a group" if of_cases else "each is a group of its own"
    values = [row[group] for row in table.rows if row.get(group)]
    # A block of merged cells is exported as its first cell and empty ones below, so that no value is there twice.
    merged = (
        "; cells that were merged in a spreadsheet have to be filled down" if 0 < len({*values}) == len(values) else ""
    )
    return [f"{table.name}: {without} of {rows} have no {group}: {own}{merged}"]


def _with_same_content(
    table: Table, groups: Sequence[str], rows: Sequence[Mapping[str, str]]
) -> tuple[list[str], list[str]]:
    """Return (the group of each row, notes), with groups joined if slides of theirs have the same content.

    A note names the slides of each content that is in several files; scenes of one file are joined without a note.

    Args:
        table: The labels, a row for each slide or case.
        groups: The group of each row.
        rows: Slides with their digests: rows of the store's manifest, or of a table that has these columns itself.
    """
    key, notes = table.key, []
    # Group -> the group that it is joined to; at first, itself.
    joined = {name: name for name in groups}
    group_of = {row[key]: name for row, name in zip(table.rows, groups, strict=True)}
    key_of_slide = {row["slide_id"]: row.get(key, "") for row in rows if row.get("slide_id")}
    for same in same_content(rows):
        keys = [key_of_slide[slide] for slide in same.slides]
        # Slides that the table does not have are in no group.
        content_groups = list(dict.fromkeys(joined[group_of[row_key]] for row_key in keys if row_key in group_of))
        if content_groups and not same.scenes:
            notes.append(f"{same.text}: {', '.join(same.slides)}")
        # Groups that were joined to these before follow: A = B and B = C make one group.
        joined = {
            name: content_groups[0] if group_name in content_groups else group_name
            for name, group_name in joined.items()
        }
    return [joined[name] for name in groups], notes


def _write(table: Table, out: Path, group: str, drawn: Sequence[Sequence[str]], folds: int | None) -> None:
    """Write the splits.

    Args:
        table: The labels.
        out: The file.
        group: Column of the groups.
        drawn: For each draw, the part of each row; those after the first are repeats.
        folds: Number of folds; None: train, val and test.
    """
    keys = [column for column in dict.fromkeys(("slide_id", "case_id", group)) if column in table.columns]
    columns = ["split"] if folds is None else ["fold", *(f"split_{fold}" for fold in range(folds))]
    columns += [f"repeat_{repeat}" for repeat in range(1, len(drawn))]
    rows: dict[str, dict[str, str]] = {}
    for row, part, *repeated_folds in zip(table.rows, *drawn, strict=True):
        assigned = {"split": part} if folds is None else {"fold": part}
        for fold in range(folds or 0):
            if not part:  # no fold: a row of the fixed test set
                assigned[f"split_{fold}"] = TEST
            else:
                assigned[f"split_{fold}"] = "val" if part == str(fold) else "train"
        assigned |= {f"repeat_{repeat}": repeated_fold for repeat, repeated_fold in enumerate(repeated_folds, 1)}
        # Several rows of one key are in one group, so they have the same part.
        rows[row[table.key]] = {column: row[column] for column in keys} | assigned
    try:
        write_table(out, [*keys, *columns], rows.values())
    except OSError as error:
        raise RequestError(f"--out: cannot write {out}: {error.strerror or error}") from error


def _report(
    out: Path,
    parts: Sequence[str],
    names: Sequence[str],
    groups: Sequence[str],
    strata: Sequence[str],
    as_json: bool,
) -> None:
    """Print how many rows, groups and classes each split or fold has.

    Args:
        out: The file that was written.
        parts: The split or fold of each row.
        names: Names of the splits or folds, in the order to print.
        groups: The group of each row.
        strata: The class of each row; empty texts if there are none.
        as_json: Also print one JSON object.
    """
    counts: dict[str, dict[str, Any]] = {}
    for name in names:
        indices = [i for i, part in enumerate(parts) if part == name]
        of_class = Counter(strata[i] for i in indices) if any(strata) else Counter()
        counts[name] = {
            "rows": len(indices),
            "groups": len({groups[i] for i in indices}),
            "classes": dict(sorted(of_class.items())),
        }
    for name, count in counts.items():
        classes = ", ".join(f"{label or '(unlabelled)'} {n}" for label, n in count["classes"].items())
        title = name if name in SPLITS else f"fold {name}"
        rows, in_groups = console.counted(count["rows"], "row"), console.counted(count["groups"], "group")
        console.say(f"{title:>6}: {rows} in {in_groups}" + (f" ({classes})" if classes else ""))
    console.say(f"wrote {out}")
    if as_json:
        console.emit_json({"out": str(out), "parts": counts})
