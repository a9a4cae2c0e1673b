"""A clean table and one lie in it: read as the clean one, or refused; what is left out is in the notes."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from data.csv_table import read_table
from data.missing import MISSING
from data.samples.dataset import select_slides
from data.samples.labels import Labels, load_labels, with_cases
from data.samples.matching import match_labels
from data.samples.splits import load_splits
from data.spelling import canonical, without_ending
from hyfi_core.errors import RequestError
from workflows.commands.split import run

Rows = list[dict[str, str]]
COLUMNS = ("slide_id", "case_id", "label", "split")
SLIDES = (lambda k: f"S-{k:03d}", lambda k: str(k + 1), lambda k: f"Pr\u00f6be {k} a", lambda k: f"TCGA-{k:02d}-DX1")
CLASSES = (("benign", "malignant"), ("0", "1"), ("low grade", "high grade"), ("\u00fcber", "unter"))
SPELLINGS: dict[str, Callable[[str], str]] = {
    "upper case": str.upper,
    "title case": str.title,
    "zero width": lambda text: text[:1] + "\u200b" + text[1:],
    "byte order mark": lambda text: "\ufeff" + text,
    "no-break space": lambda text: text.replace(" ", "\u00a0") + "\u00a0",
    "blanks": lambda text: f"  {text}\t",
    "decomposed": lambda text: unicodedata.normalize("NFD", text),
    "full width": lambda text: "".join(chr(ord(c) + 0xFEE0) if c.isdigit() else c for c in text),
    "dash": lambda text: text.replace("-", "\u2013"),
    "zeros": lambda text: f"00{text}" if text.isdecimal() else text,
    "float": lambda text: f"{text}.0" if text.isdecimal() else text,
    "ending": lambda text: f"{text}.svs",
    "guarded": lambda text: f'="{text}"',
}


def plain_csv(rows: Rows, separator: str = ",", end: str = "\n", quoting: int = csv.QUOTE_MINIMAL) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=separator, lineterminator=end, quoting=quoting)  # type: ignore[arg-type]
    writer.writerows([COLUMNS, *(list(row.values()) for row in rows)])
    return text.getvalue()


def numbered(rows: Rows, first: int) -> str:
    lines = plain_csv(rows).splitlines()
    return "\n".join([f",{lines[0]}", *(f"{first + k},{line}" for k, line in enumerate(lines[1:]))])


FORMS: dict[str, Callable[[Rows], bytes]] = {
    "plain": lambda rows: plain_csv(rows).encode(),
    "byte order mark": lambda rows: plain_csv(rows).encode("utf-8-sig"),
    "utf-16": lambda rows: plain_csv(rows, "\t", "\r\n").encode("utf-16"),
    "semicolons": lambda rows: plain_csv(rows, ";").encode(),
    "sep=": lambda rows: b"sep=;\r\n" + plain_csv(rows, ";", "\r\n").encode(),
    "bars": lambda rows: plain_csv(rows, "|").encode(),
    "old line ends": lambda rows: plain_csv(rows, ",", "\r").encode(),
    "quotes": lambda rows: plain_csv(rows, quoting=csv.QUOTE_ALL).encode(),
    "blank lines": lambda rows: b"\n" + plain_csv(rows).encode() + b"\n,,,,,\n\n",
    "pandas index": lambda rows: numbered(rows, 0).encode(),
    "R index": lambda rows: numbered(rows, 1).encode(),
    "latin-1": lambda rows: plain_csv(rows).encode("latin-1", "replace"),
    "column in capitals": lambda rows: plain_csv(rows).replace("label", "Label", 1).encode(),
    "column twice": lambda rows: plain_csv(rows).replace("split", "label", 1).encode(),
}


@st.composite
def clean_tables(draw: st.DrawFn) -> Rows:
    """Twelve to twenty slides of two classes; each case has one to three slides, in one split."""
    name, classes = draw(st.sampled_from(SLIDES)), draw(st.sampled_from(CLASSES))
    rows: Rows = []
    for case in range(8):
        split = ("train", "val", "test", "train")[case % 4]
        for _ in range(draw(st.integers(1, 3)) + (case == 0)):
            rows.append(
                {"slide_id": name(len(rows)), "case_id": str(case + 1), "label": classes[case // 2 % 2], "split": split}
            )
    return rows


def outcome(path: Path, manifest: Rows, merge: bool) -> tuple[dict[str, tuple[str, str]], Labels]:
    """Return slide to (form of its class, split) as a run has them."""
    labels = load_labels(path, "label", rows=manifest, merge_alike=merge)
    known = with_cases(manifest, labels)
    match_labels(known, labels).check("labels.csv", allow_unmatched=False)
    splits = load_splits(path, known, merge_alike=merge)
    chosen = {name: select_slides(known, labels, splits, name) for name in ("train", "val", "test")}
    return {
        ref.slide_id: (canonical(without_ending(labels.classes[ref.label or 0])).replace(" ", ""), split)
        for split, refs in chosen.items()
        for ref in refs
    }, labels


def truth(rows: Rows) -> dict[str, tuple[str, str]]:
    return {
        r["slide_id"]: (canonical(r["label"]).replace(" ", ""), r["split"]) for r in rows if r["label"] and r["split"]
    }


def patients_in_two_splits(folder: Path, path: Path, rows: Rows, merge: bool) -> list[str]:
    """Return the true patients that ``hyfi split`` puts into two splits; it may refuse."""
    out = folder / "new-splits.csv"
    out.unlink(missing_ok=True)
    try:
        run(path, out, None, "case_id", None, 0, merge_alike=merge)
    except RequestError:
        assert not out.exists()
        return []
    places: dict[str, set[str]] = {}
    cases = {canonical(row["slide_id"]): row["case_id"] for row in rows}
    for row in read_table(out, "splits").rows:
        places.setdefault(cases[canonical(row["slide_id"].removesuffix(".svs"))], set()).add(row["split"])
    return [case for case, found in places.items() if len(found) > 1]


@settings(max_examples=120, deadline=None)
@given(
    clean_tables(),
    st.sampled_from(sorted(SPELLINGS)),
    st.sampled_from(COLUMNS),
    st.data(),
    st.booleans(),
)
def test_a_name_in_another_spelling(
    tmp_path_factory: pytest.TempPathFactory, rows: Rows, lie: str, column: str, data: st.DataObject, merge: bool
) -> None:
    changed = data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1))
    lying = [{**row, column: SPELLINGS[lie](row[column])} if k in changed else row for k, row in enumerate(rows)]
    folder = tmp_path_factory.mktemp("lie")
    path = folder / "labels.csv"
    path.write_bytes(plain_csv(lying).encode())
    manifest = [{"slide_id": row["slide_id"], "case_id": row["case_id"], "status": "done"} for row in rows]
    try:
        found, _ = outcome(path, manifest, merge)
        event("read")
        assert found == truth(rows)
    except RequestError as error:
        event("refused")
        assert not merge or (lie, column) == ("ending", "split"), error
    assert patients_in_two_splits(folder, path, rows, merge) == []


@settings(max_examples=60, deadline=None)
@given(
    clean_tables(),
    st.sampled_from([*MISSING, "", " NaN ", "[Unknown]"]),
    st.sampled_from(("label", "split")),
    st.data(),
)
def test_missing_words(
    tmp_path_factory: pytest.TempPathFactory, rows: Rows, word: str, column: str, data: st.DataObject
) -> None:
    changed = data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1, max_size=4))
    lying = [{**row, column: word} if k in changed else row for k, row in enumerate(rows)]
    empty = [{**row, column: ""} if k in changed else row for k, row in enumerate(rows)]
    path = tmp_path_factory.mktemp("lie") / "labels.csv"
    path.write_bytes(plain_csv(lying).encode())
    manifest = [{"slide_id": row["slide_id"], "case_id": row["case_id"], "status": "done"} for row in rows]
    found, labels = outcome(path, manifest, False)
    assert found == truth(empty)
    assert bool(labels.notes) == (column == "label" and bool(word))


@settings(max_examples=60, deadline=None)
@given(clean_tables(), st.sampled_from(sorted(FORMS)))
def test_a_table_in_another_form(tmp_path_factory: pytest.TempPathFactory, rows: Rows, form: str) -> None:
    path = tmp_path_factory.mktemp("lie") / "labels.csv"
    path.write_bytes(FORMS[form](rows))
    manifest = [{"slide_id": row["slide_id"], "case_id": row["case_id"], "status": "done"} for row in rows]
    try:
        assert outcome(path, manifest, False)[0] == truth(rows)
    except RequestError:
        assert form in ("latin-1", "column in capitals", "column twice")
