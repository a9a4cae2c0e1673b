"""Patterns over names of parameters."""

from __future__ import annotations

import pytest

from hyfi_core.errors import RequestError
from workflows.finetuning.patterns import check_matches, matches

NAMES = ("encoder.layer1.0.weight", "encoder.layer10.0.weight", "head.weight", "head.bias")


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("encoder", NAMES[:2]),
        ("encoder.layer1", NAMES[:1]),  # not layer10
        ("*.layer1", NAMES[:1]),
        ("encoder.layer1*", NAMES[:2]),
        ("*.bias", NAMES[3:]),
        ("head.weight", NAMES[2:3]),
        ("*", NAMES),
        ("layer1", ()),
        ("Head", ()),
    ],
)
def test_a_pattern_chooses_parameters_and_whole_modules(pattern: str, chosen: tuple[str, ...]) -> None:
    assert tuple(name for name in NAMES if matches(name, pattern)) == chosen


def test_a_pattern_that_chooses_nothing_is_refused_with_similar_names() -> None:
    with pytest.raises(
        RequestError, match=r"model.freeze: 'encoder.layr1' .* did you mean encoder.layer1.* its modules"
    ):
        check_matches("model.freeze", ["head", "encoder.layr1"], NAMES)
