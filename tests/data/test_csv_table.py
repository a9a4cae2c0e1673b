"""Tables as spreadsheets, pandas and R write them; and ours, which no spreadsheet runs."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.csv_table import csv_bytes, read_own, read_table
from hyfi_core.errors import RequestError

PLAIN = "slide_id,label\na,x\nb,y\n"
ROWS = ({"slide_id": "a", "label": "x"}, {"slide_id": "b", "label": "y"})


@pytest.mark.parametrize(
    "data",
    [
        PLAIN,
        "\ufeff" + PLAIN,
        codecs.BOM_UTF16_LE + PLAIN.replace(",", "\t").encode("utf-16-le"),
        codecs.BOM_UTF16_BE + PLAIN.replace(",", ";").encode("utf-16-be"),
        PLAIN.replace("\n", "\r"),
        PLAIN.replace("\n", "\r\n") + "\r\n , \r\n,,,\r\n",
        "\n\n" + PLAIN.replace(",", ";"),
        "sep=;\n" + PLAIN.replace(",", ";"),
        '"sep=|"\r\n' + PLAIN.replace(",", "|"),
        PLAIN.replace(",", "|"),
        '"slide_id","label"\n="a","x"\n\'b,y\n'.replace("'b", "b"),
        ",slide_id,label\n0,a,x\n1,b,y\n",
        '"","slide_id","label"\n"1","a","x"\n"2","b","y"\n',
        "slide_id\u200b, label \na,x\nb,y\n",
    ],
)
def test_one_table_in_many_forms(tmp_path: Path, data: str | bytes) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    table = read_table(path, "labels")
    assert table.columns == ("slide_id", "label") and table.rows == ROWS


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('sep=;\nslide_id;note\na;"two\nlines"\n\nb;\n')
    assert read_table(tmp_path / "t.csv", "labels").lines == (4, 6)


def test_separators_in_quotes_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('slide_id,"a;b;c;d"\nx,"1;2"\n')
    assert read_table(tmp_path / "t.csv", "labels").rows == ({"slide_id": "x", "a;b;c;d": "1;2"},)


def test_names_of_columns_are_in_composed_unicode(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("slide_id,Gro\u0308\u00dfe\na,1\n", encoding="utf-8")
    assert read_table(tmp_path / "t.csv", "labels").columns == ("slide_id", "Gr\u00f6\u00dfe")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PK\x03\x04rest", "a spreadsheet .a workbook.*save the table as CSV UTF-8"),
        (b"\x1f\x8b\x08", "compressed, not a CSV"),
        (
            "slide_id,label\na,M\u00fcller\n".encode("cp1252"),
            "line 2 is not a CSV in UTF-8.*save the table as CSV UTF-8",
        ),
        ("slide_id,label\n1,a,x\n2,b,y\n", "every row has one value more.*the first being '1'.*row.names = FALSE"),
        (",slide_id,label\nx,a,1\ny,b,2\n", "line 2: the value 'x' has no column name; name the column"),
        ("slide_id,label\na,x\nb,y,z\n", "line 3: the value 'z' has no column name; put values with the separator"),
        ("slide_id,label\u200b,label\na,x,y\n", "two columns are named 'label'"),
    ],
)
def test_the_real_cause_is_named(tmp_path: Path, data: str | bytes, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(RequestError, match=words):
        read_table(path, "labels")


@pytest.mark.parametrize("text", ["=1+1", "@x", "+cmd|'/c calc'!A0", "-2+3", "'=1", "\t=1", "\r=1", "-", "+", "-A1"])
def test_no_cell_of_ours_starts_a_formula(text: str) -> None:
    data = csv_bytes([text, "b"], [{text: text, "b": "x"}])
    assert data.decode().replace('"', "").startswith("'")
    assert read_own(data) == ([text, "b"], [{text: text, "b": "x"}])


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_rows_inside_of_quotes_are_refused(tmp_path: Path, separator: str) -> None:
    """A quote that belongs to a text, as for inches, hid the rows up to the next one."""
    rows = ["slide_id,label,comment", "S0,a,fine", 'S1,b,"see below', "S2,a,", 'S3,b,10"', "S4,a,"]
    (tmp_path / "t.csv").write_text("\n".join(rows).replace(",", separator))
    with pytest.raises(RequestError, match=r"line 5: a cell in quotes has 'S2.*a.*' in it, which is a row: a quote is"):
        read_table(tmp_path / "t.csv", "labels")
    rows[2:5] = ['S1,b,"see below\nthis, is, text\n2 cm, or, so\n1,2"']
    (tmp_path / "t.csv").write_text("\n".join(rows).replace(",", separator))
    assert [row["slide_id"] for row in read_table(tmp_path / "t.csv", "labels").rows] == ["S0", "S1", "S4"]


@pytest.mark.parametrize("comment", ["margin:\n2,5 mm", "17 seen,\n18, not 17\nby two readers"])
def test_numbers_in_comments_of_several_lines_are_no_rows(tmp_path: Path, comment: str) -> None:
    (tmp_path / "t.csv").write_text(f'slide_id,comment\n1,fine\n2,\n3,"{comment}"\n4,\n')
    rows = read_table(tmp_path / "t.csv", "labels").rows
    assert [row["slide_id"] for row in rows] == ["1", "2", "3", "4"] and rows[2]["comment"] == comment


@pytest.mark.parametrize("text", ["-1.5", "+7", "-1e-05", "a=b", "1-2", "", "'quoted'"])
def test_other_texts_are_written_as_they_are(text: str) -> None:
    assert csv_bytes(["a", "b"], [{"a": "x", "b": text}]) == f"a,b\nx,{text}\n".encode()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8), min_size=1, max_size=5))
def test_what_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    rows = [{"slide_id": "s", "value": text} for text in texts]
    data = csv_bytes(["slide_id", "value"], rows)
    assert read_own(data) == (["slide_id", "value"], rows)
    path = tmp_path_factory.mktemp("t") / "t.csv"
    path.write_bytes(data)
    if not any(text.startswith('="') for text in texts):
        assert [row["value"] for row in read_table(path, "t").rows] == [text.strip() for text in texts]


@pytest.mark.parametrize("column", ["Case_ID", "case id", "CaseID", "case-id"])
def test_a_column_in_another_spelling_is_not_missed(tmp_path: Path, column: str) -> None:
    """Without case_id each slide is a case of its own, and a patient comes into training and test."""
    (tmp_path / "a.csv").write_text(f"slide_id,{column},label\na,P1,x\nb,P1,y\n")
    with pytest.raises(RequestError, match=f"the column '{column}' is not read as 'case_id'; rename it to case_id"):
        read_table(tmp_path / "a.csv", "labels")
    assert read_table(tmp_path / "a.csv", "labels", used=[column]).columns[1] == column
    (tmp_path / "b.csv").write_text(f"slide_id,{column},case_id\na,P1,x\n")
    assert read_table(tmp_path / "b.csv", "labels").columns == ("slide_id", column, "case_id")
    (tmp_path / "c.csv").write_text("path,Source MPP\na.svs,0.5\n")
    with pytest.raises(RequestError, match="rename it to source_mpp"):
        read_table(tmp_path / "c.csv", "manifest")


def test_a_first_line_that_names_another_separator_is_the_cause(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("sep=;\nslide_id,label\na,x\n")
    with pytest.raises(RequestError, match="first line says sep=;, but ',' separates the cells"):
        read_table(tmp_path / "a.csv", "labels")
    (tmp_path / "a.csv").write_text("sep=;\nslide_id;label\na;x,y\n")
    assert read_table(tmp_path / "a.csv", "labels").rows == ({"slide_id": "a", "label": "x,y"},)
