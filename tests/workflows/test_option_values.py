"""Cells on the command line, and what limits their memory."""

from __future__ import annotations

import pytest

from hyfi_core.errors import RequestError
from workflows.option_values import parse_cells, parse_fractions


def test_cells_and_what_limits_their_memory() -> None:
    assert parse_cells(None) is None
    assert parse_cells("4, 8") == (4, 8)
    assert parse_cells("4,8", "2GB", "fast") == (4, 8)
    assert parse_cells("auto", None, "fast") == parse_cells(None, "2GB", "memory") == "auto"


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (("4",), "--cells 4: use rows and columns"),
        (("0,2",), "--cells 0,2: use rows and columns"),
        (("auto",), "--cells auto needs --spill FOLDER"),
        ((None, "2GB"), "--memory 2GB needs --spill FOLDER"),
        (("4,4", "2GB"), "--memory 2GB needs --spill FOLDER"),
        ((None, None, "fast"), "--spill fast needs --cells R,C or --memory"),
    ],
)
def test_options_that_do_not_fit_together(given: tuple[str | None, ...], cause: str) -> None:
    with pytest.raises(RequestError, match=cause):
        parse_cells(*given)


@pytest.mark.parametrize("text", ["0.7,nan,0.3", "inf,1,1", "0.7;0.3"])
def test_fractions_that_are_no_numbers_are_refused(text: str) -> None:
    """With nan, a split was left out in silence; with an infinity, all shares were equal to nothing."""
    assert parse_fractions("0.7,0.1,0.2") == [0.7, 0.1, 0.2]
    with pytest.raises(RequestError, match=f"--fractions {text}: use the shares"):
        parse_fractions(text)
