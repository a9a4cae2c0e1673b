"""Random numbers by position."""

from __future__ import annotations

import torch

from hyfi_core.ops.draws import _hashed, _shifted, mixed


def test_words_are_those_of_splitmix64() -> None:
    """Against the generator's own stream of the seed 1234567 (Steele, Lea and Flood, 2014)."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    words = _hashed(1234567, torch.arange(1, 6))
    assert [word % 2**64 for word in words.tolist()] == expected


def test_one_mixed_word_is_a_step_of_splitmix64() -> None:
    assert mixed(0) == 16294208416658607535  # the first number of the seed 0


def test_shifts_are_unsigned() -> None:
    words = torch.tensor([-1, -(2**63), 2**62])
    for by in (1, 11, 40, 63):
        assert _shifted(words, by).tolist() == [(word % 2**64) >> by for word in words.tolist()]
