from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.loading.batches import BatchLayout
from data.loading.order import SampleStream, balanced_weights, column_weights, epoch_order, weighted_order
from data.samples.dataset import SlideRef
from data.samples.keyed import keyed_bits, keyed_uniforms
from data.samples.labels import Labels
from hyfi_core.errors import RequestError


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
    layout, stream = BatchLayout.uniform(batch_size, replicas), SampleStream(n, 7)
    turns = range(-(-6 * n // layout.turn_samples))
    steps = [[[stream.at(k)[1] for k in layout.numbers(turn, r)] for r in range(replicas)] for turn in turns]
    assert all(len(step) == replicas and all(len(batch) == batch_size for batch in step) for step in steps)
    flat = [index for step in steps for batch in step for index in batch]
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


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any), st.integers(0, 99), st.integers(0, 99))
def test_each_sample_is_drawn_as_often_as_its_weight_says(weights, seed, epoch):
    n, total = len(weights), sum(weights)
    order = weighted_order(weights, seed, epoch)
    counts = np.bincount(order, minlength=n)
    assert order.dtype == np.int64 and len(order) == n
    assert all(abs(count - n * weight / total) < 1 for count, weight in zip(counts, weights, strict=True))
    assert all(count == 0 for count, weight in zip(counts, weights, strict=True) if weight == 0)
    assert np.array_equal(order, weighted_order([4 * weight for weight in weights], seed, epoch))


def test_equal_weights_draw_each_sample_once():
    assert sorted(weighted_order([0.1] * 30, 5, 2).tolist()) == list(range(30))


def test_over_many_epochs_shares_are_exact():
    weights = [0.5, 1.0, 0.25, 3.0]
    counts = np.bincount(np.concatenate([weighted_order(weights, 1, epoch) for epoch in range(2000)]), minlength=4)
    assert counts / 8000 == pytest.approx(np.array(weights) / sum(weights), abs=0.005)


def dealt_whole(layout: BatchLayout) -> list[tuple[int, int]]:
    """Return (number, replica) of 21 turns, in the order in which each replica takes its own."""
    dealt = []
    for turn in range(21):
        own = [(n, r) for r in range(layout.replicas) for n in layout.numbers(turn, r)]
        assert sorted(n for n, _ in own) == list(range(turn * layout.turn_samples, (turn + 1) * layout.turn_samples))
        dealt += own
    assert all(layout.replica_of(n) == r for n, r in dealt)
    for replica in range(layout.replicas):
        mine, batch = [n for n, r in dealt if r == replica], layout.batch_of(replica)
        assert [layout.index_in_replica(n) for n in mine] == list(range(21 * batch))
        assert [layout.position_of(n) for n in mine] == list(range(batch)) * 21
    return dealt


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4))
def test_unequal_shares_cut_every_round_among_all_replicas(shares, rounds):
    layout = BatchLayout(tuple(shares), rounds)
    dealt_whole(layout)
    assert layout.turn_samples == sum(layout.batch_of(r) for r in range(layout.replicas)) == sum(shares) * rounds
    for turn, round_ in ((0, 0), (3, rounds - 1)):
        of_round = [
            n
            for replica, share in enumerate(shares)
            for n in layout.numbers(turn, replica)[round_ * share : (round_ + 1) * share]
        ]
        first = (turn * rounds + round_) * sum(shares)
        assert of_round == list(range(first, first + sum(shares)))


def test_equal_batches_are_pieces_of_a_turn():
    layout = BatchLayout.uniform(3, 2)
    assert [list(layout.numbers(1, replica)) for replica in range(2)] == [[6, 7, 8], [9, 10, 11]]
    shared = BatchLayout((2, 1), rounds=2)
    assert [list(shared.numbers(1, replica)) for replica in range(2)] == [[6, 7, 9, 10], [8, 11]]


@given(st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_replicas_share_the_stream_without_repeats_or_losses(batch, replicas, weighted):
    stream = SampleStream(7, 3, [1, 0, 5, 1, 1, 2, 1] if weighted else None)
    dealt = dealt_whole(BatchLayout.uniform(batch, replicas))
    assert len({stream.at(n) for n, _ in dealt}) == len(dealt)  # no image is varied alike twice
    again = SampleStream(7, 3, stream.weights)
    assert [again.at(n) for n, _ in dealt[::-1]] == [stream.at(n) for n, _ in dealt[::-1]]


def test_a_sample_that_comes_again_is_varied_anew():
    stream = SampleStream(4, 0, [1, 9, 1, 1])
    keys = [key for key, index in (stream.at(k) for k in range(8)) if index == 1]
    assert len(keys) == len(set(keys)) >= 4
    assert {key % 2**32 for key in keys} == {0, 1}


@pytest.mark.parametrize("weights", [[1.0], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")]])
def test_weights_that_draw_nothing_are_refused(weights):
    with pytest.raises(ValueError, match="2 samples need 2 weights"):
        SampleStream(2, 0, weights)


def slides(*labels):
    return [SlideRef(f"s{i}", f"c{i // 2}", label) for i, label in enumerate(labels)]


def test_balanced_classes_are_drawn_alike_often():
    given_ = slides(0, 0, 0, 0, 0, 0, 0, 1, 1, 2)
    order = weighted_order(balanced_weights(given_), 0, 0)
    counts = np.bincount([given_[i].label for i in order])
    assert sorted(counts.tolist()) == [3, 3, 4]


def test_weights_of_a_column_by_slide_and_by_case():
    rows = ({"slide_id": "s0", "w": "2"}, {"slide_id": "s1", "w": "0.5"}, {"slide_id": "s9", "w": ""})
    labels = Labels("y", "slide_id", ("a", "b"), {}, {}, rows)
    assert column_weights(slides(0, 1), labels, "w") == (2.0, 0.5)
    by_case = Labels("y", "case_id", ("a", "b"), {}, {}, ({"case_id": "c0", "w": "3"},))
    assert column_weights(slides(0, 1), by_case, "w") == (3.0, 3.0)
    with pytest.raises(RequestError, match="no column 'v'; they have: slide_id, w"):
        column_weights(slides(0, 1), labels, "v")
    with pytest.raises(RequestError, match="slide s2 has '' in 'w'"):
        column_weights(slides(0, 1, 0), labels, "w")
    two = Labels("y", "case_id", ("a", "b"), {}, {}, ({"case_id": "c0", "w": "3"}, {"case_id": "c0", "w": "2"}))
    with pytest.raises(RequestError, match="case_id c0 has two values in 'w': '3' and '2'"):
        column_weights(slides(0, 1), two, "w")
    alike = Labels("y", "case_id", ("a", "b"), {}, {}, ({"case_id": "c0", "w": "1"}, {"case_id": "c0", "w": "1.0"}))
    assert column_weights(slides(0), alike, "w") == (1.0,)
    huge = Labels("y", "case_id", ("a", "b"), {}, {}, ({"case_id": "c0", "w": "1e308"},))
    with pytest.raises(RequestError, match="the numbers in 'w' are too large"):
        column_weights(slides(0, 1), huge, "w")
    zero = Labels("y", "case_id", ("a", "b"), {}, {}, ({"case_id": "c0", "w": "0"},))
    with pytest.raises(RequestError, match="0 for every training slide"):
        column_weights(slides(0, 1), zero, "w")
