from __future__ import annotations

import csv
import json
import random
import unicodedata

import pytest

from data.csv_table import read_table
from data.samples.labels import load_labels
from data.samples.splits import load_splits
from data.store.manifest import SlideRecord, merge_manifest
from hyfi_core.errors import RequestError
from workflows.commands.split import SplitOptions, run


@pytest.fixture
def labels(tmp_path):
    """60 cases of one to three slides; one case in five is a tumour."""
    rng = random.Random(4)
    path = tmp_path / "labels.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["slide_id", "case_id", "label", "hospital"])
        for case in range(60):
            label = "tumour" if case % 5 == 0 else "normal"
            for slide in range(rng.randint(1, 3)):
                writer.writerow([f"s{case}-{slide}", f"c{case}", label, f"h{case % 9}"])
    return path


def rows_of(path):
    return read_table(path, "splits").rows


def test_splits_keep_cases_whole_and_classes_alike(labels, tmp_path):
    out = tmp_path / "new" / "splits.csv"
    assert run(labels, out, None, "case_id", "label", 0) == 0
    splits = load_splits(out)
    slides = load_labels(labels, "label")
    assert set(splits) == set(slides.indices)
    for split, share in (("train", 0.7), ("val", 0.15), ("test", 0.15)):
        inside = [slide for slide, part in splits.items() if part == split]
        tumours = sum(slides.of(slide) for slide in inside) / sum(slides.of(s) for s in splits)
        assert abs(len(inside) / len(splits) - share) < 0.04
        assert abs(tumours - share) < 0.08
    assert [p.name for p in out.parent.iterdir()] == ["splits.csv"]


def test_every_fold_has_a_column_in_which_it_validates(labels, tmp_path):
    out = tmp_path / "folds.csv"
    assert run(labels, out, 4, "case_id", "label", 0) == 0
    assert {row["fold"] for row in rows_of(out)} == set("0123")
    validated: list[str] = []
    for fold in range(4):
        by_column = load_splits(out, column=f"split_{fold}")
        folds = {row["slide_id"]: row["fold"] for row in rows_of(out)}
        assert by_column == {slide: "val" if number == str(fold) else "train" for slide, number in folds.items()}
        validated += [slide for slide, split in by_column.items() if split == "val"]
    assert sorted(validated) == sorted(row["slide_id"] for row in rows_of(out))


def test_other_groups_stay_whole(labels, tmp_path):
    out = tmp_path / "splits.csv"
    assert run(labels, out, 3, "hospital", None, 0) == 0
    folds: dict[str, set[str]] = {}
    for row in rows_of(out):
        folds.setdefault(row["hospital"], set()).add(row["fold"])
    assert len(folds) == 9 and all(len(of) == 1 for of in folds.values())


def test_the_seed_decides_and_nothing_else(labels, tmp_path):
    paths = [tmp_path / name for name in ("a.csv", "b.csv", "c.csv")]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        run(labels, path, None, "case_id", None, seed)
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()


def test_labels_by_case_and_by_slide_alone(tmp_path):
    for key in ("case_id", "slide_id"):
        path = tmp_path / f"{key}.csv"
        path.write_text(f"{key},label\n" + "".join(f"k{i},x\n" for i in range(10)))
        assert run(path, tmp_path / "out.csv", 5, "case_id", "label", 0) == 0
        rows = rows_of(tmp_path / "out.csv")
        assert [row[key] for row in rows] == [f"k{i}" for i in range(10)]
        assert sorted(row["fold"] for row in rows) == sorted("0123401234")


def test_one_json_object_comes_last(labels, tmp_path, capsys):
    run(labels, tmp_path / "splits.csv", None, "case_id", "label", 0, as_json=True)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sum(part["groups"] for part in told["parts"].values()) == 60
    assert sum(part["classes"]["tumour"] for part in told["parts"].values()) > 12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((61, "case_id", None), "60 groups cannot fill 61 splits"),
        ((13, "case_id", "label"), "class 'tumour' is in 12 groups, which cannot fill 13 splits"),
        ((1, "case_id", None), "--folds: given 1"),
        ((None, "patient", None), "no column 'patient' .--group.*hospital"),
        ((None, "case_id", "grade"), "no column 'grade' .--stratify."),
        ((None, "slide_id", None), "case_id c.* is in two groups"),
    ],
)
def test_impossible_requests_write_nothing(labels, tmp_path, options, words):
    with pytest.raises(RequestError, match=words):
        run(labels, tmp_path / "out" / "splits.csv", *options, 0)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def half_known(tmp_path_factory):
    """A store of nine slides; it knows the case of each but the last two."""
    store = tmp_path_factory.mktemp("half")
    cases = [f"c{n // 2}" if n < 7 else "" for n in range(9)]
    for n, case in enumerate(cases):
        SlideRecord(f"s{n}", "", "done", extra={"case_id": case}).save(store)
    merge_manifest(store)
    return store


@pytest.mark.parametrize(
    ("further", "words"),
    [
        ("s8,other", "slide_id s8 has two cases: c4 on line 10 and other on line 11"),
        ("s1,c3", "slide_id s1 has two cases: c0 on line 3 and c3 on line 11"),
        ("s8,", ""),
        ("s8,unknown", ""),
    ],
)
@pytest.mark.parametrize("with_store", [False, True])
def test_a_slide_has_the_case_of_one_of_its_rows_and_never_two(half_known, tmp_path, further, words, with_store):
    table, out = tmp_path / "labels.csv", tmp_path / "splits.csv"
    rows = [f"s{n},c{n // 2},{'ab'[n % 2]}" for n in range(9)]
    table.write_text("\n".join(["slide_id,case_id,label", *rows, f"{further},a"]) + "\n")
    store = half_known if with_store else None
    if words:
        with pytest.raises(RequestError, match=words):
            run(table, out, None, "case_id", None, 0, store=store)
        assert not out.exists()
    else:
        run(table, out, None, "case_id", None, 0, store=store)
        assert {row["slide_id"]: row["case_id"] for row in rows_of(out)} == {f"s{n}": f"c{n // 2}" for n in range(9)}


def test_an_unwritable_place_is_named(labels, tmp_path):
    with pytest.raises(RequestError, match=r"--out: cannot write .*labels.csv/splits.csv"):
        run(labels, labels / "splits.csv", None, "case_id", None, 0)


SPELLINGS = {
    "zeros": [lambda n: f"{n:03d}", str],
    "floats": [str, lambda n: f"{n}.0"],
    "case": [lambda n: f"P{n:03d}", lambda n: f"p{n:03d}"],
    "no-break space": [lambda n: f"P {n:03d}", lambda n: f"P\u00a0{n:03d}"],
    "zero width": [lambda n: f"P{n:03d}", lambda n: f"P{n:03d}\u200b"],
    "NFD": [lambda n: f"M\u00fcller-{n}", lambda n: unicodedata.normalize("NFD", f"M\u00fcller-{n}")],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_patient_in_two_spellings_is_refused_or_stays_in_one_split(hyfi_here, tmp_path, name):
    forms = SPELLINGS[name]
    rows = [f"s{i:03d},{forms[i % 2](i // 2)},{'ab'[i // 2 % 2]}" for i in range(120)]
    (tmp_path / "labels.csv").write_text("slide_id,case_id,label\n" + "\n".join(rows), encoding="utf-8")
    command = ["split", "labels.csv", "--out", "splits.csv", "--stratify", "label"]
    refused = hyfi_here(*command)
    assert refused.returncode == 2 and "case_id: names that are written in several ways" in refused.stderr
    assert "(line 3) and " in refused.stderr and "--merge-alike" in refused.stderr
    assert not (tmp_path / "splits.csv").exists()
    joined = hyfi_here(*command, "--merge-alike")
    assert joined.returncode == 0 and "note: labels.csv: case_id: read " in joined.stderr
    splits = {row["slide_id"]: row["split"] for row in rows_of(tmp_path / "splits.csv")}
    assert [k for k in range(60) if splits[f"s{2 * k:03d}"] != splits[f"s{2 * k + 1:03d}"]] == []


def test_missing_cases_are_counted(hyfi_here, tmp_path):
    (tmp_path / "some.csv").write_text("slide_id,case_id\n" + "".join(f"s{i},{i if i > 2 else ''}\n" for i in range(9)))
    assert (
        "3 of 9 rows have no case_id: each is a group of its own"
        in hyfi_here("split", "some.csv", "--out", "o.csv").stderr
    )
    (tmp_path / "none.csv").write_text("slide_id\n" + "".join(f"s{i}\n" for i in range(9)))
    assert (
        "no column case_id: each of its 9 rows is a case of its own"
        in hyfi_here("split", "none.csv", "--out", "o.csv").stderr
    )


def test_rows_that_the_store_lacks_are_named(half_known, tmp_path, capsys):
    table = tmp_path / "labels.csv"
    table.write_text("slide_id,label\n" + "".join(f"s{n},{'xy'[n % 2]}\n" for n in range(12)))
    run(table, tmp_path / "splits.csv", None, "case_id", None, 0, store=half_known)
    assert "slide_id: 3 of 12 are not in the store, or failed there: s9, s10, s11" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["slide_id", "case_id"])
def test_the_same_content_stays_in_one_split(hyfi_here, tmp_path, key):
    """Slide k and slide k + 20 of other cases are equal byte by byte."""
    (tmp_path / "store").mkdir()
    stored = [f"s{i},c{i},done,{i % 20:064x}" for i in range(40)]
    (tmp_path / "store" / "manifest.csv").write_text("slide_id,case_id,status,source_sha256\n" + "\n".join(stored))
    (tmp_path / "labels.csv").write_text(f"{key},label\n" + "".join(f"{key[0]}{i},{'xy'[i % 2]}\n" for i in range(40)))
    done = hyfi_here("split", "labels.csv", "--out", "splits.csv", "--store", "store", "--stratify", "label")
    assert done.returncode == 0, done.stderr
    assert "the same content (source files that are equal byte by byte): s0, s20" in done.stderr
    splits = {row[key]: row["split"] for row in rows_of(tmp_path / "splits.csv")}
    assert len(splits) == 40 and set(splits.values()) == {"train", "val", "test"}
    assert [i for i in range(20) if splits[f"{key[0]}{i}"] != splits[f"{key[0]}{i + 20}"]] == []
    if key == "slide_id":  # a store's manifest knows by itself
        done = hyfi_here("split", "store/manifest.csv", "--out", "again.csv")
        splits = {row[key]: row["split"] for row in rows_of(tmp_path / "again.csv")}
        assert [i for i in range(20) if splits[f"s{i}"] != splits[f"s{i + 20}"]] == []


def test_the_same_content_stays_in_one_split_however_the_store_writes_its_cases(tmp_path):
    """Slides b0 of case C0, which the store also writes c0, and d0 of case D0 are equal byte by byte."""
    stored = [
        line
        for i in range(20)
        for line in (f"a{i},C{i},done,{99 + i:064x}", f"b{i},c{i},done,{i:064x}", f"d{i},D{i},done,{i:064x}")
    ]
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifest.csv").write_text("slide_id,case_id,status,source_sha256\n" + "\n".join(stored))
    labels, out = tmp_path / "labels.csv", tmp_path / "splits.csv"
    labels.write_text("case_id,label\n" + "".join(f"C{i},x\nD{i},y\n" for i in range(20)))
    run(labels, out, None, "case_id", None, 0, store=tmp_path / "store", merge_alike=True)
    splits = {row["case_id"]: row["split"] for row in rows_of(out)}
    assert len(splits) == 40 and [i for i in range(20) if splits[f"C{i}"] != splits[f"D{i}"]] == []


def test_missing_words_are_no_case_and_no_class(hyfi_here, tmp_path):
    """Fifteen slides of unknown cases are no giant case, and NA is no class to balance."""
    rows = [f"s{i},{'unknown' if i % 2 else f'c{i}'},{('x', 'y', 'NA')[i % 3]}" for i in range(30)]
    (tmp_path / "labels.csv").write_text("slide_id,case_id,label\n" + "\n".join(rows))
    command = ["split", "labels.csv", "--out", "splits.csv", "--stratify", "label", "--json"]
    done = hyfi_here(*command)
    assert "case_id: read as missing: 'unknown' 15" in done.stderr and "15 of 30 rows have no case_id" in done.stderr
    parts = json.loads(done.stdout.splitlines()[-1])["parts"]
    assert sum(part["groups"] for part in parts.values()) == 30
    assert {name for part in parts.values() for name in part["classes"]} == {"", "x", "y"}
    done = hyfi_here(*command, "--missing", "unknown")
    parts = json.loads(done.stdout.splitlines()[-1])["parts"]
    assert {name for part in parts.values() for name in part["classes"]} == {"NA", "x", "y"}


def test_names_like_formulas_are_written_as_texts_and_come_back(hyfi_here, tmp_path):
    names = [f"{sign}cmd{i}" for i, sign in enumerate("=@+-" * 3)]
    (tmp_path / "labels.csv").write_text("slide_id\n" + "\n".join(names))
    assert hyfi_here("split", "labels.csv", "--out", "splits.csv").returncode == 0
    lines = (tmp_path / "splits.csv").read_text().splitlines()[1:]
    assert all(line.startswith("'") for line in lines)
    assert [row["slide_id"] for row in rows_of(tmp_path / "splits.csv")] == names


def test_fractions_and_a_fixed_test_set_are_kept(labels, tmp_path):
    out = tmp_path / "splits.csv"
    run(labels, out, None, "case_id", None, 0, options=SplitOptions(None, [0.5, 0.5, 0.0], "hospital=h3,h4"))
    hospital = {row["slide_id"]: row["hospital"] for row in rows_of(labels)}
    splits = load_splits(out)
    assert {slide for slide, part in splits.items() if part == "test"} == {
        slide for slide, of in hospital.items() if of in ("h3", "h4")
    }
    parts = [part for part in splits.values() if part != "test"]
    assert abs(parts.count("train") - parts.count("val")) <= 3


@pytest.mark.parametrize("name", ["labels.csv", "manifest.csv", "text.txt"])
def test_a_table_of_something_else_is_not_replaced(hyfi_here, tmp_path, name):
    (tmp_path / "labels.csv").write_text("slide_id,site,label\n" + "".join(f"s{k},u{k},a\n" for k in range(4)))
    (tmp_path / "manifest.csv").write_text("slide_id,label,split\na,b,train\n")
    (tmp_path / "text.txt").write_bytes(b"\n\xff\n")
    before = (tmp_path / name).read_bytes()
    done = hyfi_here("split", "labels.csv", "--out", name)
    assert done.returncode == 2 and f"{name} exists and is not a table of splits by case_id" in done.stderr
    assert (tmp_path / name).read_bytes() == before
    for more in ([], ["--folds", "3"], ["--folds", "3", "--repeats", "2", "--group", "site"], ["--group", "site"]):
        assert hyfi_here("split", "labels.csv", "--out", "splits.csv", *more).returncode == 0


def test_splits_are_not_replaced_by_those_drawn_from_them(hyfi_here, tmp_path):
    """The test set of a published table was in training afterwards."""
    table = "slide_id,split\n" + "".join(f"s{k},{'test' if k > 7 else 'train'}\n" for k in range(10))
    (tmp_path / "official.csv").write_text(table)
    (tmp_path / "link.csv").symlink_to(tmp_path / "official.csv")
    for name in ("official.csv", "link.csv"):
        done = hyfi_here("split", "official.csv", "--out", name)
        assert done.returncode == 2 and f"--out {name} is the table that is read" in done.stderr, done.stderr
    assert (tmp_path / "official.csv").read_text() == table


def test_rows_of_the_test_set_in_another_spelling_are_not_trained_on(tmp_path):
    path, out = tmp_path / "labels.csv", tmp_path / "splits.csv"
    path.write_text("slide_id,site\n" + "".join(f"s{k},{('Leeds', 'York', 'leeds')[k % 3]}\n" for k in range(12)))
    chosen = SplitOptions(fixed_test="site=Leeds")
    with pytest.raises(RequestError, match=r"'leeds' \(line 4\): --fixed-test has 'Leeds', another case"):
        run(path, out, None, "case_id", None, 0, options=chosen)
    run(path, out, None, "case_id", None, 0, options=chosen, merge_alike=True)
    assert {slide for slide, part in load_splits(out).items() if part != "test"} == {"s1", "s4", "s7", "s10"}


def test_slides_of_a_case_without_a_site_are_one_group(tmp_path, capsys):
    path, out = tmp_path / "labels.csv", tmp_path / "splits.csv"
    sites = ["A", "B", "C", "", "", ""]
    path.write_text("slide_id,case_id,site\n" + "".join(f"s{k},c{k // 2},{sites[k // 2]}\n" for k in range(12)))
    run(path, out, None, "site", None, 0)
    splits = load_splits(out)
    assert [k for k in range(0, 12, 2) if splits[f"s{k}"] != splits[f"s{k + 1}"]] == []
    assert "6 of 12 rows have no site: those of a case are a group" in capsys.readouterr().err


@pytest.mark.parametrize("cases", ["c0,,c1,,c2,", "c0,c0,c1,,c2,"])
def test_cases_like_merged_cells_are_named(hyfi_here, tmp_path, cases):
    rows = "".join(f"s{k},{case}\n" for k, case in enumerate(cases.split(",")))
    (tmp_path / "labels.csv").write_text(f"slide_id,case_id\n{rows}")
    said = hyfi_here("split", "labels.csv", "--out", "splits.csv").stderr
    assert "have no case_id: each is a group of its own" in said
    assert ("own; cells that were merged in a spreadsheet have to be filled down" in said) == (",,c1" in cases)


def test_folds_are_drawn_several_times_without_the_test_set(labels, tmp_path):
    out = tmp_path / "folds.csv"
    run(labels, out, 3, "case_id", None, 0, options=SplitOptions(repeats=2, fixed_test="hospital=h3"))
    rows = rows_of(out)
    assert {row["fold"] for row in rows} == {row["repeat_1"] for row in rows} == {"0", "1", "2", ""}
    assert all((row["fold"] == "") == (row["repeat_1"] == "") == (row["split_0"] == "test") for row in rows)
    assert [row["fold"] for row in rows] != [row["repeat_1"] for row in rows]


def test_numbers_are_balanced_by_quarters_also_with_classes(tmp_path, capsys):
    path = tmp_path / "labels.csv"
    path.write_text("slide_id,months,died\n" + "".join(f"s{k},{k},{k % 2}\n" for k in range(80)))
    run(path, tmp_path / "out.csv", None, "case_id", "months,died", 0, options=SplitOptions(None, [0.5, 0.25, 0.25]))
    months = {row["slide_id"]: int(row["months"]) for row in rows_of(path)}
    for split, share in (("train", 10), ("val", 5), ("test", 5)):
        inside = [months[slide] for slide, part in load_splits(tmp_path / "out.csv").items() if part == split]
        assert all(abs(sum(low <= month < low + 20 for month in inside) - share) <= 1 for low in (0, 20, 40, 60))
    assert "months quarter 1; died 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fractions": [0.5, 0.5]}, "train, val and test"),
        ({"fractions": [0.5, 0.2, 0.3], "fixed_test": "hospital=h1"}, "its share must be 0"),
        ({"fixed_test": "hospital"}, "COLUMN=VALUE"),
        ({"fixed_test": "hospitl=h1"}, "no column 'hospitl'"),
        ({"fixed_test": "hospital=h1,h99"}, "no row has h99; hospital has: h0"),
        ({"fixed_test": "hospital=h1,"}, "COLUMN=VALUE"),
        ({"fixed_test": "hospital=H1"}, r"'h1' \(line [0-9]+\): --fixed-test has 'H1', another case"),
        ({"repeats": 2}, "needs --folds"),
    ],
)
def test_wrong_options_are_answered(labels, tmp_path, options, said):
    with pytest.raises(RequestError, match=said):
        run(labels, tmp_path / "out.csv", None, "case_id", None, 0, options=SplitOptions(**options))


def test_one_slide_with_two_labels_is_refused(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("slide_id,label\n" + "".join(f"s{k},{'ab'[k % 2]}\n" for k in range(12)) + "s3,a\n")
    with pytest.raises(RequestError, match="s3 has two labels: 'b' on line 5 and 'a' on line 14"):
        run(path, tmp_path / "out.csv", None, "case_id", None, 0)


def test_a_row_that_is_there_twice_counts_once(tmp_path, capsys):
    """As after two exports were pasted together: the classes of a split were balanced by rows."""
    rows = "".join(f"s{k},c{k},{'ab'[k % 2]}\n" for k in range(20))
    for name, text in (("once", rows), ("twice", rows + "s0,c0,a\n" * 5)):
        (tmp_path / f"{name}.csv").write_text("slide_id,case_id,label\n" + text)
        assert run(tmp_path / f"{name}.csv", tmp_path / f"{name}-splits.csv", None, "case_id", "label", 0) == 0
    assert (tmp_path / "once-splits.csv").read_text() == (tmp_path / "twice-splits.csv").read_text()
    said = capsys.readouterr()
    assert "twice.csv: 5 repeated rows left out" in said.err and "25 rows" not in said.out


def test_names_of_slides_may_be_in_another_column(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("File,label\n" + "".join(f"s{k}.svs,{'ab'[k % 2]}\n" for k in range(12)))
    run(path, tmp_path / "out.csv", None, "case_id", None, 0, options=SplitOptions("File"))
    assert rows_of(tmp_path / "out.csv")[0]["slide_id"] == "s0.svs"
    with pytest.raises(RequestError, match="no column 'Name'"):
        run(path, tmp_path / "out.csv", None, "case_id", None, 0, options=SplitOptions("Name"))
