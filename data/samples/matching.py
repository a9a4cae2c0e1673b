"""Match of labels with the slides of a store: a table of counts, and an error for labels without slides."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from data.csv_table import Table
from data.samples.labels import Labels, agreed_cases
from data.samples.names import STORE_MANIFEST
from data.spelling import canonical, without_ending
from data.store.manifest import DONE, same_content
from hyfi_core.errors import RequestError

MAX_LISTED = 10


def plain_name(text: str) -> str:
    """Return a name without folders, slide suffix, case and white space, for comparing spellings of a name."""
    return canonical(without_ending(re.split(r"[/\\]", text)[-1].strip())).replace(" ", "")


@dataclass(frozen=True)
class LabelMatch:
    """The match between labels and the slides of a store.

    Attributes:
        key: The key of the labels, ``slide_id`` or ``case_id``.
        slides: Slide -> its label as text, for slides that are ingested and labelled, in the manifest's order.
        classes: All classes, in the order of the logits.
        failed: Labelled slides whose ingest failed.
        unlabelled: Ingested slides without a label.
        unmatched: Keys of labelled rows that no slide of the store has.
        similar: Unmatched key -> the store's name that differs only in suffix, folder, upper case or white space.
        without_case: Slides of ``slides`` whose case is not known; each counts as a separate case.
        without_split: Slides of ``slides`` that are in no split, and therefore not used.
        notes: Sentences for the user about how the labels were read, and about slides with the same content.
        counts: Class to its number of ``slides``.
    """

    key: str
    slides: Mapping[str, str]
    classes: tuple[str, ...]
    failed: tuple[str, ...]
    unlabelled: tuple[str, ...]
    unmatched: tuple[str, ...]
    similar: Mapping[str, str]
    without_case: tuple[str, ...] = ()
    without_split: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """Return a text table of counts: matches, rows without slides, slides of each class."""
        rows = [
            ("slides with a label", len(self.slides), ""),
            ("slides without a label", len(self.unlabelled), _some(self.unlabelled)),
            ("rows that match no slide", len(self.unmatched), _some(self.unmatched)),
        ]
        if self.failed:
            rows.append(("labelled slides that failed", len(self.failed), _some(self.failed)))
        if self.without_case:
            own = f"{_some(self.without_case)}: each is a case of its own"
            rows.append(("labelled slides without a case", len(self.without_case), own))
        if self.without_split:
            rows.append(("labelled slides in no split", len(self.without_split), _some(self.without_split)))
        rows += [(f"class {name}", self.counts.get(name, 0), "") for name in self.classes]
        width = max(len(label) for label, _, _ in rows)
        lines = [f"  {label:<{width}}  {n:>6}  {names}".rstrip() for label, n, names in rows]
        return "\n".join(["labels:", *lines, *(f"  note: {note}" for note in self.notes)])

    @property
    def _has_names(self) -> bool:
        """Whether ``unlabelled`` can show what the keys of labels should look like."""
        return self.key == "slide_id" and bool(self.unlabelled)

    def check(self, source: str, allow_unmatched: bool) -> None:
        """Refuse labels of slides that the store does not have.

        Args:
            source: The labels' file, for the message.
            allow_unmatched: Accept rows that match no slide, for example if only a part of a cohort is ingested. Rows
                in ``similar`` are still refused.

        Raises:
            RequestError: There are such rows; the message names them, the similar names, and what to do.
        """
        refused = [key for key in self.unmatched if key in self.similar or not allow_unmatched]
        if not refused:
            return
        named = [
            f"  {key}" + (f": the store has {self.similar[key]!r}" if key in self.similar else "")
            for key in refused[:MAX_LISTED]
        ]
        if len(refused) > MAX_LISTED:
            named.append(f"  … and {len(refused) - MAX_LISTED} more")
        remedies = []
        if any(key in self.similar for key in refused):
            remedies.append(f"write {self.key} as in the store's manifest.csv")
        if not self.slides and not self.similar:
            like = f"; those of the store are like {self.unlabelled[0]!r}" if self._has_names else ""
            remedies.append(f"no slide has a label: write each {self.key} as in the store's manifest.csv{like}")
        elif any(key not in self.similar for key in refused):
            remedies.append(
                "ingest the missing slides, or set data.allow_unmatched=true if they are left out on purpose"
            )
        lines = [f"{source}: {len(refused)} labelled rows match no slide of the store by {self.key}:", *named]
        raise RequestError("\n".join([*lines, "; ".join(remedies)]))


def match_labels(
    rows: Iterable[Mapping[str, str]],
    labels: Labels,
    splits: Mapping[str, str] | None = None,
    table: str = "the labels",
    manifest: str = STORE_MANIFEST,
) -> LabelMatch:
    """Compare labels with the rows of a manifest.

    Args:
        rows: Rows of the manifest.
        labels: The labels.
        splits: Slide to split, if there are splits.
        table: Where the labels come from, for notes.
        manifest: Where the rows come from, for notes.
    """
    rows = list(rows)
    cases = agreed_cases(rows, labels, table, manifest)
    rows_with_cases = cases.filled(rows)
    slides: dict[str, str] = {}
    counts: Counter[str] = Counter()
    failed, unlabelled = [], []
    for row in rows_with_cases:
        index = labels.of(row["slide_id"], row["case_id"])
        if row.get("status", "done") != "done":
            failed += [row["slide_id"]] if index is not None else []
        elif index is None:
            unlabelled.append(row["slide_id"])
        else:
            slides[row["slide_id"]] = labels.text(index)
            counts.update(labels.names_of(index))
    names = {row[labels.key] for row in rows_with_cases} - {""}
    unmatched = [key for key, index in labels.indices.items() if index is not None and key not in names]
    # Sorted, so that the same one of several similar names is proposed every time.
    by_plain = {plain_name(name): name for name in sorted(names)}
    return LabelMatch(
        labels.key,
        slides,
        labels.classes,
        tuple(failed),
        tuple(unlabelled),
        tuple(unmatched),
        similar={key: by_plain[plain_name(key)] for key in unmatched if plain_name(key) in by_plain},
        without_case=tuple(
            row["slide_id"] for row in rows_with_cases if row["slide_id"] in slides and not row["case_id"]
        ),
        without_split=() if splits is None else tuple(slide for slide in slides if slide not in splits),
        notes=(
            *labels.notes,
            *cases.notes,
            *_same_content_notes(rows_with_cases, slides),
        ),
        counts=counts,
    )


def _same_content_notes(rows: Sequence[Mapping[str, str]], slides: Mapping[str, str]) -> list[str]:
    """Return a sentence for each group of labelled slides with the same content."""
    groups = same_content(row for row in rows if row["slide_id"] in slides)
    return [
        f"{group.text}: " + ", ".join(f"{slide} ({slides[slide]})" for slide in group.slides)
        for group in groups
        if not group.scenes
    ]


def absent_notes(table: Table, rows: Iterable[Mapping[str, str]]) -> list[str]:
    """Return a note on slides, or cases, of a table that no finished slide of a store has; empty if it has them all.

    Args:
        table: The table, in the store's spelling.
        rows: Rows of the store's manifest.
    """
    finished = {row.get(table.key, "") for row in rows if row.get("status") == DONE}
    names = dict.fromkeys(row[table.key] for row in table.rows)
    absent = tuple(name for name in names if name not in finished)
    if not absent:
        return []
    counts = f"{len(absent)} of {len(names)}"
    return [f"{table.name}: {table.key}: {counts} are not in the store, or failed there: {_some(absent)}"]


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
