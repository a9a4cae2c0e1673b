"""Slides and cases of a table under the names that the store has for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from data.csv_table import KEYS, Table
from data.missing import MISSING, is_missing
from data.spelling import NameKind, joined_note, one_spelling, shown
from data.store.manifest import SameContent
from hyfi_core.errors import RequestError

STORE_MANIFEST = "the store's manifest.csv"
"""Default name, in messages, of the table with the slides and their cases."""


@dataclass(frozen=True)
class NamedTable:
    """A table with one spelling of each slide and case.

    Attributes:
        table: The table.
        notes: Sentences about spellings that were joined.
    """

    table: Table
    notes: tuple[str, ...] = ()


def with_one_name_each(
    table: Table, rows: Iterable[Mapping[str, str]] = (), *, merge: bool = False, missing: Iterable[str] = MISSING
) -> NamedTable:
    """Return a table with one spelling of each slide and case: that of ``rows``, if they have it.

    Names that mean missing (``NA``) become ``""``, unless a slide of ``rows`` has this name.

    Args:
        table: The table; columns other than ``slide_id`` and ``case_id`` are not changed.
        rows: Rows of the store's manifest.
        merge: Whether several spellings of one name are joined.
        missing: Words that mean that a name is missing.

    Raises:
        RequestError: A name has several spellings, and ``merge`` is off.
    """
    store_rows, named = list(rows), NamedTable(table)
    for column in KEYS:
        if column in table.columns:
            names = [row.get(column, "") for row in store_rows]
            named = without_missing(named, column, missing, keep=names if column == "slide_id" else ())
            named = column_in_one_way(named, column, "name", merge=merge, known_names=names)
    return named


def column_in_one_way(
    named: NamedTable,
    column: str,
    kind: NameKind,
    *,
    merge: bool,
    known_names: Iterable[str] = (),
    knows: str = "the store",
) -> NamedTable:
    """Return the table with one spelling of each name in a column, and a note for the user if any were changed.

    Args:
        named: The table, with notes about earlier changes.
        column: The column.
        kind: Whether the column has names or classes.
        merge: True: join several spellings of one name; False: refuse them.
        known_names: Spellings that never change.
        knows: Who has ``known_names``, for messages.

    Raises:
        RequestError: A name has several spellings, and ``merge`` is off.
    """
    table, where = named.table, f"{named.table.name}: {column}"
    values = [row[column] for row in table.rows]
    spelled = one_spelling(values, kind, where, merge=merge, lines=table.lines, known_names=known_names, knows=knows)
    if not spelled.joined:
        return named
    changed = ({**row, column: spelled.spelling.get(row[column], "")} for row in table.rows)
    return NamedTable(replace(table, rows=tuple(changed)), (*named.notes, joined_note(where, spelled.joined)))


def without_missing(
    named: NamedTable, column: str, missing: Iterable[str] = MISSING, *, keep: Iterable[str] = ()
) -> NamedTable:
    """Return a table in which words of a column that mean missing are replaced by ``""``; words in ``keep`` stay.

    Raises:
        RequestError: ``-`` would be read as missing, but the column has a class ``+``.
    """
    exempt, words, table = set(keep), tuple(missing), named.table
    values = Counter(row[column] for row in table.rows if row[column])
    missing_words = {
        value: count for value, count in values.items() if value not in exempt and is_missing(value, words)
    }
    if not missing_words:
        return named
    rows = tuple({**row, column: "" if row[column] in missing_words else row[column]} for row in table.rows)
    # Otherwise all slides of the class "-" would be unlabelled in silence.
    if "+" in values and "-" in missing_words:
        raise RequestError(
            f"{table.name}: {column}: '-' is read as missing, but '+' is a class; write negative and positive, or list "
            "what is missing as data.missing (hyfi split --missing)"
        )
    listed = ", ".join(f"{shown(value)} {count}" for value, count in missing_words.items())
    return NamedTable(replace(table, rows=rows), (*named.notes, f"{table.name}: {column}: read as missing: {listed}"))


def with_one_spelling_of_cases(
    rows: Sequence[Mapping[str, str]], where: str, *, merge: bool, missing: Iterable[str] = MISSING
) -> list[dict[str, str]]:
    """Return copies of manifest rows with one spelling of each case; ``""`` where it is missing.

    Raises:
        RequestError: A case has several spellings, and ``merge`` is off.
    """
    words, cases = tuple(missing), [row.get("case_id", "") for row in rows]
    cases = ["" if is_missing(case, words) else case for case in cases]
    spelling = one_spelling(cases, "name", f"{where}: case_id", merge=merge).spelling
    return [{**row, "case_id": spelling.get(case, "")} for row, case in zip(rows, cases, strict=True)]


def cases_of(table: Table) -> dict[str, str]:
    """Return slide -> case, for slides with a case; empty if the table lacks one of the two columns.

    A slide may have several rows; its rows without a case are ignored.

    Raises:
        RequestError: A slide has two cases.
    """
    cases: dict[str, str] = {}
    lines: dict[str, int] = {}
    if not {"slide_id", "case_id"} <= set(table.columns):
        return cases
    for line, row in zip(table.lines, table.rows, strict=True):
        slide, case = row["slide_id"], row["case_id"]
        if not slide or not case:
            continue
        if cases.setdefault(slide, case) != case:
            both = f"{cases[slide]} on line {lines[slide]} and {case} on line {line}"
            raise RequestError(f"{table.name}: slide_id {slide} has two cases: {both}")
        lines.setdefault(slide, line)
    return cases


@dataclass(frozen=True)
class AgreedCases:
    """Cases of slides on which the store's manifest and a table agree.

    Attributes:
        cases: Slide -> case; slides that have a case in neither are left out.
        notes: Sentences for the user about how the table's names of cases were read.
    """

    cases: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, stored: Mapping[str, str], own: Mapping[str, str], table: str, manifest: str = STORE_MANIFEST
    ) -> AgreedCases:
        """Return the cases of the manifest, and where it has none, those of the table.

        The table may have other names for all cases, one for one: the result has the manifest's names.

        Args:
            stored: Slide -> case in the manifest; "" where it is unknown.
            own: Slide -> case in the table; "" where it is unknown.
            table: Name of the table, for messages.
            manifest: Name of the manifest, for messages.

        Raises:
            RequestError: Two slides are of the same case in one of them and of different cases in the other, or the
                table has the name of one case for another. Splits, bags and metrics by case would be wrong.
        """
        # ``case`` is the name of a case in the manifest, ``name`` the name of the same case in the table.
        cases, names = set(stored.values()), set(own.values())
        first_of_case: dict[str, str] = {}
        first_of_name: dict[str, str] = {}
        # Sorted, so that the message names the same slides every time.
        for slide in sorted(slide for slide in stored.keys() & own.keys() if stored[slide] and own[slide]):
            case, name = stored[slide], own[slide]
            # The first slides with the same case and with the same name, perhaps this slide itself.
            by_case, by_name = first_of_case.setdefault(case, slide), first_of_name.setdefault(name, slide)
            if own[by_case] != name:
                both = f"of one case in the manifest ({case}), and of two in the table ({own[by_case]}, {name})"
                raise _contradiction(table, manifest, f"{by_case} and {slide} are {both}", case)
            if stored[by_name] != case:
                both = f"of one case in the table ({name}), and of two in the manifest ({stored[by_name]}, {case})"
                raise _contradiction(table, manifest, f"{by_name} and {slide} are {both}", name)
            if name != case and (name in cases or case in names):
                both = f"of the case {case} in the manifest, and of {name} in the table"
                text = f"{slide} is {both}, and one of these names is another case's, too"
                raise _contradiction(table, manifest, text)
        renamed = {name: stored[slide] for name, slide in first_of_name.items() if name != stored[slide]}
        merged = {slide: renamed.get(name, name) for slide, name in own.items() if name}
        # Last, because the manifest wins where both have a case.
        merged |= {slide: case for slide, case in stored.items() if case}
        return cls(merged, (_renamed_note(table, manifest, renamed),) if renamed else ())

    def filled(self, rows: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
        """Return copies of manifest rows with their ``case_id``; "" where it is not known."""
        return [{**row, "case_id": self.cases.get(row["slide_id"], "")} for row in rows]


def _contradiction(table: str, manifest: str, text: str, shared: str = "") -> RequestError:
    """Return the error for case ids of a table that contradict the manifest; ``text`` says how.

    ``shared`` is a name that one side has for slides of two cases: perhaps a word that means unknown.
    """
    correct = "correct the one that is wrong"
    if manifest == STORE_MANIFEST:  # the next ingest would undo a correction in it
        correct = "correct the table, or the manifest given to `hyfi ingest` and run that again"
    unknown = f". If {shared!r} means that the case is unknown, list it in data.missing (hyfi split --missing)"
    return RequestError(
        f"{table}: case_id contradicts {manifest}: {text}. Slides of a case stay together in splits, bags and metrics, "
        f"so both must say the same: {correct}; or, if the manifest is right, leave case_id out of the table. A run "
        "that was started with such a table can be continued with --resume once the table has no case_id"
        + (unknown if shared else "")
    )


def _renamed_note(table: str, manifest: str, renamed: Mapping[str, str]) -> str:
    """Return a note that the table has other names for cases than the manifest; ``renamed``: table's -> manifest's."""
    name, case = next(iter(renamed.items()))
    cases = "1 case" if len(renamed) == 1 else f"{len(renamed)} cases"
    return (
        f"{table}: case_id has other names than {manifest} for {cases}, one for one ({name} is {case} there); the "
        "manifest's names are taken"
    )


def refuse_content_in_two_splits(
    groups: Iterable[SameContent], splits: Mapping[str, str], where: str = "splits"
) -> None:
    """Check that slides with the same content are not in two splits.

    Args:
        groups: Slides with the same content, from `data.store.manifest.same_content`.
        splits: Slide -> split; without slides that are not used.
        where: The file, for messages.

    Raises:
        RequestError: They are; the message names two of them.
    """
    for group in groups:
        first: dict[str, str] = {}
        for slide in group.slides:
            if slide in splits:
                first.setdefault(splits[slide], slide)
        if len(first) > 1:
            (first_split, slide), (second_split, same), *_ = first.items()
            have = (
                "are scenes of one file"
                if group.scenes
                else "have the same content: the source files are equal byte by byte"
            )
            raise RequestError(
                f"{where}: {slide} (in {first_split}) and {same} (in {second_split}) {have}; put them into one "
                f"split (`hyfi split --store STORE` does), or use one of them only"
            )
