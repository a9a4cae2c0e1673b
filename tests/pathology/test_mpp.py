from __future__ import annotations

import pytest

from pathology.errors import SlideError
from pathology.mpp import is_sensible, mpp_of_resolution, parse_mpp, resolve_mpp


@pytest.mark.parametrize(("text", "value"), [("0.25", 0.25), ("0,25", 0.25), (" 1 ", 1.0), ("2.5e-1", 0.25)])
def test_numbers_as_people_write_them(text: str, value: float) -> None:
    assert parse_mpp(text) == value


@pytest.mark.parametrize("text", ["", "nan", "inf", "about 0.5"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError):
        parse_mpp(text)


@pytest.mark.parametrize(
    ("pixels", "unit", "mpp"),
    [(20_000, "centimeter", 0.5), (50_800, "inch", 0.5), (2_000, "millimeter", 0.5), (2, "micrometer", 0.5)],
)
def test_resolution_tags_in_any_unit(pixels: float, unit: str, mpp: float) -> None:
    assert mpp_of_resolution(pixels, unit) == pytest.approx(mpp)
    assert mpp_of_resolution(pixels, "") is None
    assert mpp_of_resolution(0, unit) is None


@pytest.mark.parametrize(
    ("mpp", "sensible"),
    [((0.25, 0.25), True), ((0.25, 0.262), True), ((0.25, 0.27), False), ((0.0, 0.0), False), ((352.8, 352.8), False)],
)
def test_sense(mpp: tuple[float, float], sensible: bool) -> None:
    assert is_sensible(mpp) is sensible


def test_the_file_is_believed_when_the_manifest_agrees() -> None:
    assert resolve_mpp((0.25, 0.25), "0,255", None).origin == "file"
    assert resolve_mpp((0.25, 0.25), "", 0.5).um == (0.25, 0.25)


def test_file_and_manifest_apart_are_refused_with_both_values() -> None:
    with pytest.raises(SlideError, match=r"0\.25.*source_mpp.*0\.5"):
        resolve_mpp((0.25, 0.25), "0.5", None)


def test_manifest_then_flag_give_what_the_file_does_not() -> None:
    assert resolve_mpp(None, "0,5", 0.25).um == (0.5, 0.5)
    assert resolve_mpp((352.8, 352.8), "", 0.25).origin == "flag"


@pytest.mark.parametrize("stated", [None, (0.0, 0.0), (352.8, 352.8), (0.25, 0.5)])
def test_missing_or_absurd_names_value_column_and_flag(stated: tuple[float, float] | None) -> None:
    with pytest.raises(SlideError, match=r"source_mpp.*--slide-mpp") as caught:
        resolve_mpp(stated, "", None)
    if stated is not None:
        assert f"{stated[1]:.4g}" in str(caught.value)


@pytest.mark.parametrize("cell", ["0", "300", "yes"])
def test_an_absurd_cell_is_refused(cell: str) -> None:
    with pytest.raises(SlideError, match=cell):
        resolve_mpp(None, cell, 0.5)
