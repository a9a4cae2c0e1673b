"""Labels: the class of each slide, from a CSV keyed by slide or by case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from data.csv_table import Table, natural_key, read_table
from data.missing import MISSING
from data.samples.classes import column_of_classes
from data.samples.names import STORE_MANIFEST, AgreedCases, cases_of, with_one_name_each
from hyfi_core.errors import RequestError

Target = int | tuple[float, ...]
"""The label of a slide: the index of a class, or numbers."""
Value = TypeVar("Value")
_NAMED = 3


@dataclass(frozen=True)
class Labels:
    """The labels of slides or cases: classes, or numbers.

    Attributes:
        target: The column of the label; several columns are joined by commas.
        key: The key column, ``slide_id`` or ``case_id``.
        classes: Names of the classes in the order of their indices; if a slide may have several labels, the names of
            these; empty if labels are numbers.
        indices: Slide or case (as ``key`` says) -> its label, such as the index of its class; None: in the CSV, but
            unlabelled.
        cases: Slide -> case, if the CSV has both columns.
        rows: All rows of the CSV, with their other columns.
        notes: Sentences for the user about how the CSV was read.
    """

    target: str
    key: str
    classes: tuple[str, ...]
    indices: Mapping[str, Target | None]
    cases: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[dict[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, slide_id: str, case_id: str | None = None) -> Target | None:
        """Return the label of a slide; None if it is unlabelled or not in the CSV."""
        return self.indices.get(slide_id if self.key == "slide_id" else (case_id or ""))

    def text(self, target: Target) -> str:
        """Return a label as text: the name of a class, names of several, or numbers, with ``;`` between them."""
        if isinstance(target, int) or self.classes:
            return ";".join(self.names_of(target)) or "none"
        return ";".join(f"{number:g}" for number in target)

    def names_of(self, target: Target) -> tuple[str, ...]:
        """Return the class names of a label: one, or several where a slide may have several; ``()`` for numbers."""
        if isinstance(target, int):
            return (self.classes[target],)
        return tuple(name for name, value in zip(self.classes, target, strict=False) if value == 1)

    def case_of(self, slide_id: str, default: str = "") -> str:
        """Return the case of a slide if the CSV has it, else ``default``."""
        return self.cases.get(slide_id) or default


def load_labels(
    csv: Path | Table,
    target: str,
    *,
    classes: Sequence[str] | None = None,
    rows: Iterable[Mapping[str, str]] = (),
    merge_alike: bool = False,
    missing: Iterable[str] = MISSING,
) -> Labels:
    """Read labels from a CSV with a column ``slide_id`` or ``case_id`` and the column ``target``.

    With both key columns, rows are keyed by slide. An empty value or one of ``missing`` means unlabelled, never class
    0. Without ``classes``, the classes are the values of the column: numbers by value, then words in natural order.

    Args:
        csv: The file; may be the store's own ``manifest.csv``.
        target: The column that has the class.
        classes: The allowed classes, in the order of their indices.
        rows: Rows of the store's manifest; its spellings of slides and cases are used.
        merge_alike: Whether several spellings of one slide, case or class are joined, see `data.spelling`.
        missing: Words that mean that a value is missing, see `data.missing`.

    Raises:
        RequestError: The file, a column or all labels are missing, a class is not among ``classes``, the column does
            not have classes, a slide has two labels, or a name has several spellings and ``merge_alike`` is off.
    """
    table = read_table(csv, "labels")
    table.require(target, "the class of each slide: data.target")
    key = table.key
    words = tuple(missing)
    named = with_one_name_each(table, rows, merge=merge_alike, missing=words)
    named = column_of_classes(named, target, classes=classes, merge=merge_alike, missing=words)
    table = named.table
    values = one_of_each(table, target, (row[target] or None for row in table.rows), lambda name: repr(name or ""))
    present = {name for name in values.values() if name}
    names = tuple(classes) if classes is not None else tuple(sorted(present, key=natural_key))
    if not present:
        raise RequestError(f"{table.name}: the column {target!r} is empty for every slide")
    # Logits are in the order of `names`.
    index = {name: i for i, name in enumerate(names)}
    unknown = {name: item for item, name in values.items() if name and name not in index}
    if unknown:
        name, item = next(iter(unknown.items()))
        raise RequestError(
            f"{table.name}: {key} {item}: unknown class {name!r} in {target!r}; known: {', '.join(names)}"
        )
    indices = {item: index[name] if name else None for item, name in values.items()}
    return Labels(target, key, names, indices, cases_of(table), table.rows, named.notes)


def with_cases(
    rows: Iterable[Mapping[str, str]],
    labels: Labels | None,
    table: str = "the labels",
    manifest: str = STORE_MANIFEST,
) -> list[dict[str, str]]:
    """Return copies of manifest rows with a ``case_id``: that of the row, else of the labels, else ``""``.

    Args:
        rows: Rows of the manifest.
        labels: The labels.
        table: Where the labels come from, for messages.
        manifest: Where the rows come from, for messages.

    Raises:
        RequestError: The cases of both contradict each other, see `data.samples.names.AgreedCases`.
    """
    rows = list(rows)
    return agreed_cases(rows, labels, table, manifest).filled(rows)


def agreed_cases(
    rows: Iterable[Mapping[str, str]], labels: Labels | None, table: str = "the labels", manifest: str = STORE_MANIFEST
) -> AgreedCases:
    """Return the cases of manifest rows and labels together; arguments and errors as for `with_cases`."""
    stored = {row["slide_id"]: row.get("case_id", "") for row in rows}
    return AgreedCases.of(stored, labels.cases if labels else {}, table, manifest)


def one_of_each(
    table: Table, column: str, values: Iterable[Value | None], text: Callable[[Value | None], str], noun: str = "labels"
) -> dict[str, Value | None]:
    """Return slide or case -> its value, after checking that all its rows have the same; None: empty.

    Args:
        table: The table.
        column: The column of the values, for messages.
        values: The value of each row.
        text: Returns a value as text, for messages.
        noun: Noun for the values in messages: "has two ``noun``".

    Raises:
        RequestError: Two rows of a slide or case differ, or a row has a value but no key.
    """
    values_of: dict[str, Value | None] = {}
    lines: dict[str, int] = {}
    for line, row, value in zip(table.lines, table.rows, values, strict=True):
        item = row[table.key]
        if not item:
            # A row with neither key nor value can be left out.
            if value is not None:
                raise RequestError(f"{table.name}, line {line}: {column} {text(value)}, but no {table.key}")
            continue
        if values_of.setdefault(item, value) != value:
            contradiction = f"{text(values_of[item])} on line {lines[item]} and {text(value)} on line {line}"
            raise RequestError(f"{table.name}: {table.key} {item} has two {noun}: {contradiction}")
        lines.setdefault(item, line)
    return values_of


def named_entries(cells: Sequence[tuple[int, str]]) -> str:
    """Return a text with the first few (line, text) of ``cells``: ``'-3' (line 2), 'x' (line 5) and 4 more``."""
    more = f" and {len(cells) - _NAMED} more" if len(cells) > _NAMED else ""
    return ", ".join(f"{text} (line {line})" for line, text in cells[:_NAMED]) + more


def class_weights(labels: Iterable[int | None], classes: int | Sequence[str]) -> tuple[float, ...]:
    """Return the weight of each class, N / (K · n_class) for N samples and K classes: all have the same total weight.

    The mean weight *of the labelled samples* is 1, so the scale of the loss does not depend on how rare a class is.

    Args:
        labels: Class index of each training sample; None (unlabelled) is not counted.
        classes: Number of classes, or their names.

    Raises:
        RequestError: A class has no sample, so no weight can balance it.
    """
    names = [str(i) for i in range(classes)] if isinstance(classes, int) else list(classes)
    counts = Counter(label for label in labels if label is not None)
    absent = [name for i, name in enumerate(names) if not counts[i]]
    if absent:
        raise RequestError(f"class weights: no slide of the training split has class {', '.join(absent)}")
    return tuple(counts.total() / (len(names) * counts[i]) for i in range(len(names)))
