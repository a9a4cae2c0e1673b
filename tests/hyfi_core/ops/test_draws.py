"""Random numbers by position."""

from __future__ import annotations

import torch

from hyfi_core.ops.draws import _hashed, _shifted, mixed, positions, uniform


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


def test_positions_count_the_whole_value_row_by_row() -> None:
    every = torch.arange(7, 7 + 2 * 3 * 4 * 5).view(2, 3, 4, 5)
    device = torch.device("cpu")
    assert positions((2, 3, 4, 5), None, (0, 0, 0, 0), device, 7).equal(every)
    part = positions((2, 3, 4, 5), (2, 3), (1, 3, 2, 5), device, 7)
    assert part.equal(every[:, :, 1:3, 2:5])
    turned = positions((4, 2, 5), (2, 0), (0, 5, 1, 2), device, 7)
    assert turned.equal(torch.arange(7, 47).view(4, 2, 5)[1:2])


def test_uniform_numbers_are_the_first_bits_of_the_words() -> None:
    words = [word % 2**64 for word in _hashed(5, torch.arange(4096)).tolist()]
    numbers = uniform(5, torch.arange(4096), torch.float64)
    assert numbers.tolist() == [(word >> 11) / 2**53 for word in words]
    assert uniform(5, torch.arange(4096), torch.float32).tolist() == [(word >> 40) / 2**24 for word in words]
    assert 0.9 < numbers.max() < 1.0 and numbers.min() < 0.1
