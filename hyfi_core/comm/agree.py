"""All ranks refuse or none does: checks and comparisons that end alike on every rank of a group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TypeVar

from hyfi_core.comm.activity import named_ranks
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError

T = TypeVar("T")


def agree(
    comm: Communicator,
    check: Callable[[], T],
    refusals: tuple[type[Exception], ...] = (RequestError,),
    error: type[Exception] = RequestError,
) -> T:
    """Return ``check()``; where any rank refuses, all refuse with the first such rank's words (collective).

    Args:
        comm: the ranks that agree.
        check: may differ between ranks; it must not communicate, for a rank that refuses leaves it early.
        refusals: what ``check`` raises to refuse; anything else is a fault of this rank alone and passes through.
        error: raised on every rank.

    Raises:
        Exception: ``error``, on every rank, where ``check`` refused on one.
    """
    refusal, result = None, None
    try:
        result = check()
    except refusals as raised:
        refusal = str(raised) or type(raised).__name__
    gathered = comm.gather_objects(refusal)
    first = comm.broadcast_object(next((text for text in gathered if text is not None), None) if gathered else None)
    if first is not None:
        raise error(first)
    return result  # type: ignore[return-value]


def compare(comm: Communicator, facts: Mapping[str, str]) -> None:
    """Refuse where ranks were given different things (collective; what travels is a digest unless they were).

    Args:
        comm: the ranks to compare.
        facts: name -> value, short texts; what a rank lacks counts as different.

    Raises:
        RequestError: on every rank; names what differs first, with the value of each rank.
    """
    if comm.size == 1:
        return
    digest = hashlib.sha256(json.dumps(sorted(facts.items())).encode()).hexdigest()
    digests = comm.gather_objects(digest)
    if comm.broadcast_object(len(set(digests)) == 1 if digests is not None else None):
        return
    gathered = comm.gather_objects(dict(facts))
    difference = comm.broadcast_object(_first_difference(gathered) if gathered is not None else None)
    if difference is not None:
        raise RequestError(difference)


def _first_difference(ranks: list[dict[str, str]]) -> str | None:
    """Return a sentence on the first fact that is not the same on all ranks, None if there is none."""
    for name in dict.fromkeys(name for facts in ranks for name in facts):
        holders: dict[str, list[int]] = {}
        for rank, facts in enumerate(ranks):
            holders.setdefault(facts.get(name, "not given"), []).append(rank)
        if len(holders) > 1:
            values = "; ".join(f"{value} on {named_ranks(numbers)}" for value, numbers in holders.items())
            return f"ranks were given different things: {name} is {values}; give the same on every rank"
    return None
