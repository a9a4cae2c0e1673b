from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.csv_table import natural_key, read_table, write_table
from data.samples.labels import class_weights, load_labels, named_entries
from hyfi_core.errors import RequestError


def write(tmp_path, text, name="labels.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_labels_by_slide(tmp_path):
    csv = write(tmp_path, "slide_id,case_id,label\ns1,c1,tumour\ns2,c1,\n\ns3,c2, normal \n")
    labels = load_labels(csv, "label")
    assert labels.classes == ("normal", "tumour")
    assert [labels.of(s) for s in ("s1", "s2", "s3", "s4")] == [1, None, 0, None]
    assert (labels.key, labels.case_of("s2"), labels.case_of("s4", "own")) == ("slide_id", "c1", "own")


def test_labels_by_case(tmp_path):
    labels = load_labels(write(tmp_path, "\ufeffcase_id,grade\nc1,10\nc2,9\nc3,1.5\n"), "grade")
    assert labels.classes == ("1.5", "9", "10")
    assert labels.of("any slide", "c1") == 2
    assert labels.of("c1") is None


def test_given_classes_keep_their_order(tmp_path):
    csv = write(tmp_path, "slide_id,label\na,low\nb,high\n")
    assert load_labels(csv, "label", classes=("low", "high", "none")).of("b") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slide_id,class\na,x\n", "no column 'label'.*slide_id, class"),
        ("name,label\na,x\n", "'slide_id' or 'case_id'.*name, label"),
        ("slide_id,label\na,x\nb,y\na,y\n", "slide_id a has two labels: 'x' on line 2 and 'y' on line 4"),
        ("slide_id,label\na,x\na,\n", "slide_id a has two labels: 'x' on line 2 and '' on line 3"),
        ("slide_id,case_id,label\na,k,x\na,m,x\n", "slide_id a has two cases: k on line 2 and m on line 3"),
        ("slide_id,label\n,x\n", "line 2: label 'x', but no slide_id"),
        ("slide_id,label\na,\n", "'label' is empty for every slide"),
        ("slide_id,label\n", "no rows"),
        ("slide_id,label\na,x,y\n", "line 2: the value .y. has no column name"),
        ("slide_id,label,label\na,x,y\n", "two columns are named 'label'"),
        ('slide_id,label\na,"x\n', "not valid CSV"),
    ],
)
def test_wrong_files_are_refused_with_their_reason(tmp_path, text, words):
    with pytest.raises(RequestError, match=words):
        load_labels(write(tmp_path, text), "label")


def test_an_unknown_class_is_named_with_the_known_ones(tmp_path):
    csv = write(tmp_path, "slide_id,label\na,x\nb,z\n")
    with pytest.raises(RequestError, match=r"slide_id b: unknown class 'z'.*known: x, y"):
        load_labels(csv, "label", classes=("x", "y"))


def test_a_missing_file_and_one_that_is_no_text(tmp_path):
    with pytest.raises(RequestError, match=r"cannot read .*nowhere.csv"):
        load_labels(tmp_path / "nowhere.csv", "label")
    (tmp_path / "binary.csv").write_bytes(b"slide_id,label\n\xff\xfe,\x80\n")
    with pytest.raises(RequestError, match="UTF-8"):
        load_labels(tmp_path / "binary.csv", "label")


def test_natural_order():
    names = ["b10", "b9", "A2", "10", "9", "-1", "nan", "0.5", "b"]
    assert sorted(names, key=natural_key) == ["-1", "0.5", "9", "10", "A2", "b", "b9", "b10", "nan"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text("a1. -\u0663é", max_size=6), max_size=8))
def test_natural_order_orders_any_text(names):
    assert sorted(names, key=natural_key) == sorted(reversed(names), key=natural_key)


@given(st.lists(st.sampled_from([0, 1, 2, None]), max_size=40))
def test_class_weights_have_mean_one_and_balance(found):
    labels = [0, 1, 2, *found]
    weights = class_weights(labels, 3)
    of_samples = [weights[label] for label in labels if label is not None]
    assert sum(of_samples) / len(of_samples) == pytest.approx(1)
    totals = [weights[c] * labels.count(c) for c in range(3)]
    assert totals == pytest.approx([totals[0]] * 3)


def test_a_class_without_slides_cannot_be_balanced():
    with pytest.raises(RequestError, match="class rare"):
        class_weights([0, 0, None], ("common", "rare"))


def test_tables_come_back_as_written(tmp_path):
    rows = [{"a": "1,2", "b": None}, {"a": "x\ny", "b": "ü"}]
    write_table(tmp_path / "new" / "t.csv", ("a", "b"), rows)
    table = read_table(tmp_path / "new" / "t.csv", "table")
    assert table.rows == ({"a": "1,2", "b": ""}, {"a": "x\ny", "b": "ü"})
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["t.csv"]


@pytest.mark.parametrize("count", range(1, 9))
def test_the_first_entries_are_named_and_the_others_counted(count):
    text = named_entries([(line, f"x{line}") for line in range(count)])
    listed = text.count("(line ")
    assert listed == min(count, max(listed, 1)) and text.startswith("x0 (line 0)")
    assert (f"and {count - listed} more" in text) == (listed < count) == ("more" in text)
