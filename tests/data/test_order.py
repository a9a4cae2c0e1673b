from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.keyed import keyed_bits, keyed_uniforms
from data.order import SampleStream, epoch_order, step_samples


@given(st.integers(0, 200), st.integers(0, 2**40), st.integers(0, 1000))
def test_an_epoch_has_each_sample_once(n, seed, epoch):
    order = epoch_order(n, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order, epoch_order(n, seed, epoch))


def test_epochs_and_seeds_differ():
    assert len({tuple(epoch_order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


@given(st.integers(1, 30), st.integers(0, 99), st.lists(st.integers(0, 200), max_size=30))
def test_the_stream_can_be_entered_anywhere(n, seed, numbers):
    stream = SampleStream(n, seed)
    for k in numbers:
        assert stream.at(k) == (k // n, int(epoch_order(n, seed, k // n)[k % n]))


@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 3))
def test_steps_are_full_and_are_the_stream(n, batch_size, replicas):
    steps = [step for epoch in range(6) for step in step_samples(n, batch_size, replicas, 7, epoch)]
    assert all(len(step) == replicas and all(len(batch) == batch_size for batch in step) for step in steps)
    flat = [index for step in steps for batch in step for index in batch]
    stream = SampleStream(n, 7)
    assert flat == [stream.at(k)[1] for k in range(len(flat))]
    assert 6 * n <= len(flat) < 6 * n + batch_size * replicas


def test_a_stream_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        SampleStream(0, 0)


def test_keys_of_other_kinds_are_other_keys_and_numpy_integers_are_integers():
    assert not np.array_equal(keyed_bits(2, 1, "a"), keyed_bits(2, "1", "a"))
    assert np.array_equal(keyed_bits(2, np.int64(3)), keyed_bits(2, 3))


def test_the_numbers_stay_as_they_are():
    """Runs are resumed by later versions: the order must never change."""
    assert epoch_order(8, 0, 0).tolist() == [2, 5, 6, 3, 7, 1, 4, 0]


def test_uniforms_fill_the_unit_interval():
    u = keyed_uniforms(4000, "test")
    assert u.min() >= 0 and u.max() < 1
    assert np.histogram(u, 10, (0, 1))[0].min() > 300
