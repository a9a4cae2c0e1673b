"""Which slides a model was trained on, by digests alone."""

from __future__ import annotations

import json
from types import SimpleNamespace

from data.samples.dataset import SlideDataset, SlideRef
from data.samples.trained.trained_notes import TrainedNotes
from data.samples.trained.trained_slides import TrainedSlides, _digest, _entry, source_sha256
from data.store.slide_store import StoreLevel

FILE, OTHER = "a" * 64, "b" * 64


def trained(*slides: tuple[str, str], cases: tuple[str, ...] = ()) -> TrainedSlides:
    found = TrainedSlides(frozenset(_entry(*slide) for slide in slides), frozenset(map(_digest, cases)))
    return TrainedSlides.of_json(json.loads(json.dumps(found.to_json())))


def test_a_file_is_found_under_any_name_and_a_case_in_any_slide() -> None:
    known = trained(("slide-1", FILE), cases=("patient-7",))
    assert known.has("renamed", "", FILE)
    assert known.has("new", "patient-7", OTHER)
    assert not known.has("new", "patient-8", OTHER)
    assert not known.has("new", "", OTHER)


def test_a_checkpoint_of_an_earlier_version_is_understood() -> None:
    """Its digests are compared with those of this version: of another length, none would be recognised."""
    written = {"slides": ["4267092274023cec:aaaaaaaaaaaaaaaa"], "cases": ["148de9c5a7a44d19"]}
    known = TrainedSlides.of_json(written)
    assert known.has("slide-1", "", "") and known.has("renamed", "", FILE) and known.has("new", "p", OTHER)


def test_a_name_alone_counts_only_while_a_file_is_unknown() -> None:
    assert not trained(("1", FILE)).has("1", "", OTHER)  # many archives have a slide 1
    assert trained(("1", FILE)).has("1", "", "")
    assert trained(("1", "")).has("1", "", OTHER)
    assert not trained(("1", "")).has("2", "", "")


def test_cases_without_a_name_are_not_one_case() -> None:
    assert not trained(("1", FILE), cases=()).has("2", "", OTHER)


def test_several_models_are_asked_together_and_old_ones_know_nothing() -> None:
    both = TrainedSlides.union([trained(("1", FILE)), trained(("2", OTHER), cases=("p",))])
    assert both.has("x", "", FILE) and both.has("x", "p", "") and both.has("2", "", OTHER)
    assert not TrainedSlides.of_json(None).has("1", "p", FILE)


def test_a_slide_has_the_digest_of_its_file_if_that_is_known() -> None:
    slides = [SimpleNamespace(attributes={"sha256": FILE}), SimpleNamespace(attributes={"sha256": None}), object()]
    dataset = SimpleNamespace(slide=slides.__getitem__)
    assert [source_sha256(dataset, k) for k in range(3)] == [FILE, "", ""]  # type: ignore[arg-type]


def test_names_do_not_leave_in_a_checkpoint() -> None:
    assert "patient" not in json.dumps(trained(("patient-7-slide", FILE), cases=("patient-7",)).to_json())


class Stored:
    """A slide of 2 mm by 1 mm, or of another height, with the digest of its file."""

    def __init__(self, sha256: str, height_px: int = 2000) -> None:
        self.attributes = {"sha256": sha256, "source": {"mpp": (0.5, 0.5)}}
        self.levels = (StoreLevel(height_px, 1000, (1.0, 1.0), "0"),)


def dataset_of(*slides: Stored, names: str, cases: str) -> SlideDataset:
    refs = [SlideRef(name, case.strip()) for name, case in zip(names, cases, strict=True)]
    return SlideDataset(".", refs, size_px=64, mpp=1.0, opener=lambda path: slides[names.index(path.stem)])  # type: ignore[arg-type, return-value]


def test_slides_of_training_and_those_far_from_them_are_noted() -> None:
    known = TrainedSlides.of(dataset_of(Stored(FILE), Stored(""), names="ab", cases="p "))
    assert known.slides == {_entry("a", FILE), _entry("b", "")} and known.cases == {_digest("p")}
    assert known.ranges.numbers == {"area_mm2": (2.0, 2.0), "source_mpp": (0.5, 0.5)}
    others = dataset_of(Stored(FILE), Stored(OTHER), Stored(OTHER, 8000), Stored("c" * 64), names="xyzv", cases="  qp")
    notes = TrainedNotes.of({"trained_on": known.to_json()}, others)
    assert notes.trained == ("x", "v") and list(notes.outside) == ["z"]
    assert notes.reason("z") == "outside_training: 4 times the area of the largest training slide"
    assert [notes.flags(name) for name in "xyz"] == [("trained_on",), (), ("outside_training",)]
    assert notes.reason("x") == "" and TrainedNotes.of({}, others) == TrainedNotes()
