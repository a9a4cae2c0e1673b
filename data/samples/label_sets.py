"""Several labels of each slide: from one column of yes and no for each label, or from one column that lists labels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from data.csv_table import Table, natural_key, read_table
from data.missing import MISSING
from data.samples.labels import Labels, named_entries, one_of_each
from data.samples.names import cases_of, with_one_name_each, without_missing
from data.spelling import canonical, joined_note, one_spelling, shown
from hyfi_core.errors import RequestError

YES, NO, UNKNOWN = 1.0, 0.0, -1.0
"""Values of a label in a target."""
States = tuple[float, ...]
"""A target: `YES`, `NO` or `UNKNOWN` for each label."""
NONE = "none"
"""The text for a slide that has none of the labels."""
_YES = ("1", "true", "yes", "y", "positive", "pos", "+", "present", "mut", "mutated", "mutant")
_NO = ("0", "false", "no", "n", "negative", "neg", "absent", "wt", "wild type", "wildtype", "wild-type")


def load_label_sets(
    csv: Path | Table,
    columns: Sequence[str],
    *,
    classes: Sequence[str] | None = None,
    rows: Iterable[Mapping[str, str]] = (),
    merge_alike: bool = False,
    missing: Iterable[str] = MISSING,
) -> Labels:
    """Read the labels of each slide or case: a target is a tuple with `YES`, `NO` or `UNKNOWN` for each label.

    Args:
        csv: The file.
        columns: With several columns, each has yes or no for one label, and an empty cell means unknown. With one
            column, a cell lists all labels of a slide, with ``;`` or ``|`` between them; ``;`` alone means none of the
            labels, and an empty cell means that the slide is unlabelled.
        classes: The labels, if they are known; then a label may be the same for every slide. With several columns, they
            must be the names of ``columns``, in any order; with one column, they determine the order of the labels.
        rows: Rows of the store's manifest; its spellings of slides and cases are used.
        merge_alike: Whether several spellings of one slide, case or label are joined.
        missing: Words that mean that a value is missing.

    Raises:
        RequestError: The file or a column is missing, a cell cannot be read, two rows of a slide differ, or a label is
            the same for every slide; the message names lines.
    """
    table, words = read_table(csv, "labels"), tuple(missing)
    for column in columns:
        table.require(column, "a label of each slide: data.target")
    named = with_one_name_each(table, rows, merge=merge_alike, missing=words)
    for column in columns:
        named = without_missing(named, column, words)
    table, notes = named.table, list(named.notes)
    if len(columns) > 1:
        names = tuple(columns)
        if classes is not None and set(classes) != set(names):
            raise RequestError(f"{table.name}: the columns are {', '.join(names)}; the labels {', '.join(classes)}")
        targets = _of_columns(table, names)
    else:
        names, targets, note = _of_entries(table, columns[0], classes, merge_alike)
        notes += [note] if note else []
    # `label_set_text` joins names by ";", and its texts are read again.
    wrong = [name for name in names if ";" in name or "|" in name or name == NONE]
    if wrong:
        raise RequestError(
            f"{table.name}: a label has no ; or | in its name and is not {NONE}, which means none of the labels: given "
            f"{shown(wrong[0])}; rename it, or list it as data.missing"
        )
    indices = one_of_each(table, ", ".join(columns), targets, lambda target: _text(target, names))
    labelled = [target for target in indices.values() if target is not None]
    if not labelled:
        raise RequestError(f"{table.name}: {', '.join(columns)}: no slide has a label")
    # Only in training: slides for evaluation may all have, or all lack, a label.
    if classes is None:
        _refuse_constant(table, names, labelled)
    unknown = sum(value == UNKNOWN for target in labelled for value in target)
    if unknown:
        notes.append(f"{unknown} of {len(labelled) * len(names)} labels are unknown and do not count")
    return Labels(", ".join(columns), table.key, names, indices, cases_of(table), table.rows, tuple(notes))


def state_of(text: str) -> float | None:
    """Return `YES` or `NO` if a text says so; None: neither."""
    word = canonical(text)
    if word in _YES:
        return YES
    return NO if word in _NO else None


def _of_columns(table: Table, columns: tuple[str, ...]) -> list[States | None]:
    """Return the target of each row, from a column of yes and no for each label; None if all are unknown.

    Raises:
        RequestError: A cell is neither yes nor no.
    """
    for column in columns:
        cells = [(line, row[column]) for line, row in zip(table.lines, table.rows, strict=True)]
        wrong = [(line, shown(text)) for line, text in cells if text and state_of(text) is None]
        if wrong:
            raise RequestError(
                f"{table.name}: {column}: {named_entries(wrong)}: write 1 or 0 (also yes and no, true and false, "
                "positive and negative), and nothing where it is unknown; words that mean missing belong into "
                "data.missing"
            )
    targets: list[States | None] = []
    for row in table.rows:
        states = [state_of(row[column]) for column in columns]
        target = tuple(UNKNOWN if state is None else state for state in states)
        # A slide whose labels are all unknown is unlabelled: training on it would only take time.
        targets.append(target if any(state != UNKNOWN for state in target) else None)
    return targets


def _of_entries(
    table: Table, column: str, classes: Sequence[str] | None, merge: bool
) -> tuple[tuple[str, ...], list[States | None], str]:
    """Return (names of the labels, target of each row, note about joined spellings or ``""``) from one column.

    Raises:
        RequestError: No cell has several labels, a label has several spellings, or it is not among ``classes``.
    """
    cells = [[part.strip() for part in re.split(r"[;|]", row[column]) if part.strip()] for row in table.rows]
    if classes is None and not any(len(parts) > 1 for parts in cells):
        values = list(Counter(part for parts in cells for part in parts))
        is_one_label = len(values) <= 2 and all(state_of(value) is not None for value in values)
        raise RequestError(
            f"{table.name}: {column}: no cell has several labels with ; or | between them, such as "
            f"{', '.join(map(shown, values[:2]))}; "
            + (
                "name all columns of yes and no as data.target"
                if is_one_label
                else "one class a slide is data.task: multiclass"
            )
        )
    parts = [(line, part) for line, cell in zip(table.lines, cells, strict=True) for part in cell]
    texts, lines, where = [part for _, part in parts], [line for line, _ in parts], f"{table.name}: {column}"
    spelled = one_spelling(
        texts, "class", where, merge=merge, lines=lines, known_names=classes or (), knows="the model"
    )
    names = tuple(classes) if classes is not None else tuple(sorted(set(spelled.spelling.values()), key=natural_key))
    unknown = [(line, part) for line, part in parts if spelled.spelling[part] not in names]
    if unknown:
        line, part = unknown[0]
        raise RequestError(f"{where}: unknown label {shown(part)} (line {line}); known: {', '.join(names)}")
    sets = [{spelled.spelling[part] for part in cell} for cell in cells]
    targets: list[States | None] = [
        tuple(YES if name in names_set else NO for name in names) if row[column] else None
        for names_set, row in zip(sets, table.rows, strict=True)
    ]
    return names, targets, joined_note(where, spelled.joined) if spelled.joined else ""


def _refuse_constant(table: Table, names: tuple[str, ...], labelled: Sequence[States]) -> None:
    """Refuse labels that are the same for every slide, or known for none."""
    states = [{target[k] for target in labelled} - {UNKNOWN} for k in range(len(names))]
    empty = [name for name, values in zip(names, states, strict=True) if not values]
    if empty:
        raise RequestError(
            f"{table.name}: {', '.join(empty)}: no slide has a value: there is nothing to learn; leave it out"
        )
    same = [name for name, values in zip(names, states, strict=True) if len(values) < 2]
    if same:
        raise RequestError(
            f"{table.name}: {', '.join(same)}: the same for every slide: there is nothing to learn; leave it out"
        )


def _text(target: States | None, names: tuple[str, ...]) -> str:
    return NONE if target is None else label_set_text(target, names)


def label_set_text(target: States, names: Sequence[str]) -> str:
    """Return the text of a target: ``TP53;KRAS?`` if a slide has TP53, and KRAS is unknown; ``none`` without labels."""
    parts = [f"{name}?" if value == UNKNOWN else name for name, value in zip(names, target, strict=True) if value != NO]
    return ";".join(parts) or NONE
