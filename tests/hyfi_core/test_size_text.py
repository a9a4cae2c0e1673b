"""Sizes as people read them."""

from __future__ import annotations

import pytest

from hyfi_core.size_text import size_text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 MB"),
        (4_194_304, "4.19 MB"),
        (999_000_000, "999 MB"),
        (1_000_000_000, "1 GB"),
        (12_340_000_000, "12.3 GB"),
        (99_940_000_000, "99.9 GB"),
        (2_000_400_000_000, "2,000 GB"),
    ],
)
def test_sizes_have_three_digits_and_no_exponent(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
