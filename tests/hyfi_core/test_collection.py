"""Garbage collection that is paused."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from hyfi_core.collection import collection_paused
from tests.patience import PATIENCE_S


def test_the_last_of_nested_pauses_ends_it_also_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()


def test_the_last_of_several_threads_ends_it() -> None:
    both_inside, one_outside = Barrier(2, timeout=PATIENCE_S), Barrier(2, timeout=PATIENCE_S)

    def first() -> bool:
        with collection_paused():
            both_inside.wait()
        one_outside.wait()
        return True

    def second() -> bool:
        with collection_paused():
            both_inside.wait()
            one_outside.wait()
            return gc.isenabled()

    with ThreadPoolExecutor(2) as threads:
        ends_first, stays = threads.submit(first), threads.submit(second)
        assert ends_first.result() and not stays.result()
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
