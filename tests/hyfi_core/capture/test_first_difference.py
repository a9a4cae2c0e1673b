"""Values of a module and of its program are compared up to a tolerance; NaN equals NaN, and nothing else."""

from __future__ import annotations

import pytest
import torch

from hyfi_core.capture.first_difference import equal

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("module", "program", "words"),
    [
        ([1.0, NAN], [1.0, NAN], None),
        ([1.0, INF], [1.0, INF], None),
        ([1.0, 2.0], [NAN, 2.0], "NaN at other places"),
        ([NAN, 2.0], [1.0, 2.0], "NaN at other places"),
        ([1.0, 2.0], [INF, 2.0], "infinite at other places"),
        ([INF, 2.0], [-INF, 2.0], "infinite at other places"),
        ([INF, 2.0], [INF, 2.1], "relative error"),
        ([1.0 + 2.0j], [1.0 + 3.0j], "relative error"),
        ([1.0, 2.0], [1.0, 2.1], "relative error"),
    ],
)
def test_what_is_no_number_equals_only_itself(
    module: list[float | complex], program: list[float | complex], words: str | None
) -> None:
    difference = equal({"output 0": torch.tensor(module)}, {"output 0": torch.tensor(program)}, 1e-4)
    assert (difference is None) if words is None else (difference is not None and words in difference)


def test_no_gradient_equals_one_of_zeros() -> None:
    some, none = torch.ones(2), torch.zeros(2)
    assert equal({"gradient of a": None}, {"gradient of a": none}, 1e-4) is None
    assert equal({"gradient of a": some}, {}, 1e-4) == "gradient of a is a tensor in the module and None in the program"
