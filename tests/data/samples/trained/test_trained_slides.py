"""Which slides a model was trained on, by digests alone."""

from __future__ import annotations

import json
from types import SimpleNamespace

from data.samples.trained.trained_slides import TrainedSlides, _digest, _entry, source_sha256

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
