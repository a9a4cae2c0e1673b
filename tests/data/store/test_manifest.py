from __future__ import annotations

import csv
from pathlib import Path

import pytest

from data.errors import StoreError
from data.store.manifest import (
    COLUMNS,
    DONE,
    FAILED,
    SlideRecord,
    load_manifest,
    load_records,
    merge_manifest,
    read_user_manifest,
    record_path,
)
from hyfi_core.errors import RequestError


def test_records_are_the_truth_and_the_table_is_compiled_from_them(tmp_path: Path) -> None:
    done = SlideRecord("b", "/x/b.svs", DONE, source_mpp=0.25, store_mpp=1.0, height_px=10, width_px=20)
    failed = SlideRecord("ä, 1", "/x/a.svs", FAILED, reason='it says "no",\nreally', extra={"label": "benign"})
    done.save(tmp_path)
    failed.save(tmp_path)
    with merge_manifest(tmp_path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[: len(COLUMNS)] == list(COLUMNS)
    assert [row["slide_id"] for row in rows] == ["b", "ä, 1"]
    assert rows[0]["source_mpp"] == "0.25" and rows[0]["tissue_fraction"] == "" and rows[0]["label"] == ""
    assert rows[1]["reason"] == 'it says "no",\nreally' and rows[1]["label"] == "benign"
    assert load_manifest(tmp_path)[1]["label"] == "benign"
    assert load_records(tmp_path) == {"b": done, "ä, 1": failed}


def test_a_users_column_never_replaces_ours(tmp_path: Path) -> None:
    record = SlideRecord("a", "/x/a.svs", DONE, extra={"status": "great", "case_id": "7"})
    assert record.row()["status"] == DONE and record.row()["case_id"] == "7"


def test_a_store_without_records_is_read_from_its_table(tmp_path: Path) -> None:
    (tmp_path / "manifest.csv").write_text("slide_id,status\na,done\n")
    assert load_manifest(tmp_path) == [{"slide_id": "a", "status": "done"}]
    with pytest.raises(StoreError, match="hyfi ingest"):
        load_manifest(tmp_path / "nothing")


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    SlideRecord("a", "/x/a.svs", DONE).save(tmp_path)
    record_path(tmp_path, "a").write_text('{"slide_id": "a"')
    with pytest.raises(StoreError, match=r"a\.json"):
        load_records(tmp_path)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("column", ["path", "source_path"])
def test_paths_count_from_the_manifests_folder(tmp_path: Path, separator: str, column: str) -> None:
    file = tmp_path / "m.csv"
    text = f"{column}|slide_id|source_mpp\nsub/a.svs|a|0,25\n/abs/b.svs|b|\n".replace("|", separator)
    if separator == ",":
        text = text.replace("0,25", '"0,25"')
    file.write_text(text, encoding="utf-8-sig")
    first, second = read_user_manifest(file)
    assert first == {"source_path": str(tmp_path / "sub/a.svs"), "slide_id": "a", "source_mpp": "0,25"}
    assert second["source_path"] == "/abs/b.svs"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("slide_id,label\na,1\n", "path"),
        ("path\n", "no rows"),
        ("path,slide_id\na.svs,x\nb.svs,x\n", "'x'"),
        ("path,slide_id\n,x\n", "line 2"),
        ('path;note\na.svs;"two\nlines"\n\n;;\n;x\n', "line 6"),
        ("path,note,label\na.svs,tumour, grade 2,1\n", r"m\.csv, line 2: the value '1' has no column name"),
        ("path,label,label\na.svs,1,2\n", "two columns are named 'label'"),
        ("path,label,status,reason\na.svs,1,ill,none\n", "'status', 'reason'.*rename the column"),
        ('path,label\n"a.svs,1\nb.svs,2\n', "line 3 is not valid CSV"),
        (f"path,note\na.svs,{'y' * 140_000}\n", "is not valid CSV"),
        ("path,label\na.svs,1\nb\0.svs,2\n", "line 3 has a NUL"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(RequestError, match=word):
        read_user_manifest(tmp_path / "m.csv")


def test_empty_cells_and_lines_of_a_spreadsheet_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("path;label;;\na.svs;1;;;\n;;;\nb.svs\n")
    rows = read_user_manifest(tmp_path / "m.csv")
    assert [(Path(row["source_path"]).name, row["label"], len(row)) for row in rows] == [
        ("a.svs", "1", 2),
        ("b.svs", "", 2),
    ]


def test_the_table_of_another_store_is_a_manifest(tmp_path: Path) -> None:
    SlideRecord("a", "/x/a.svs", DONE, source_mpp=0.25, extra={"label": "benign"}).save(tmp_path)
    rows = read_user_manifest(merge_manifest(tmp_path))
    assert rows == [{"slide_id": "a", "source_path": "/x/a.svs", "source_mpp": "0.25", "label": "benign"}]


def test_a_manifest_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_bytes(b"path\n\xff\xfe.svs\n")
    with pytest.raises(RequestError, match="UTF-8"):
        read_user_manifest(tmp_path / "m.csv")


def test_records_of_somebody_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(store: Path) -> None:
        raise PermissionError(13, "Permission denied", str(store / ".records"))

    monkeypatch.setattr("data.store.manifest.load_records", denied)
    with pytest.raises(StoreError, match=r"cannot be read .Permission denied."):
        load_manifest(tmp_path)
