"""Check at every call of an engine that ranks that compute with the same weight have the same values of it.

Two things are words of the message that compares a call: whether a rank has seen a change, and digests of a few values.
Only if a rank has seen a change, or digests differ, ranks compare digests of all values of the weights in question.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyfi_core.comm.activity import named_ranks
from hyfi_core.comm.agreement.weight_watch import Scope, WeightWatch
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError

_NONE = -(2**62)
"""The word of a rank that is not in a group: less than any digest and its negative."""


@dataclass(frozen=True)
class HeldWeights:
    """The weights that a rank computes with.

    Attributes:
        names: names of parameters and buffers that it uses in any direction.
        groups: for each set of ranks that update the same parameters, the parameters' names; None if this rank is not
            in the set. The order is the same on every rank.
    """

    names: Collection[str]
    groups: Sequence[Sequence[str] | None]


class SameWeights:
    """Compares the weights of ranks; see the module.

    Args:
        watch: watches this rank's model.
        weights: the weights that this rank computes with.
        settle: waits for weights that are being sent to this rank.
        resend: sends the owners' weights to ranks whose changes were overwritten, and waits; called on all ranks.
    """

    def __init__(
        self, watch: WeightWatch, weights: HeldWeights, settle: Callable[[], None], resend: Callable[[], None]
    ) -> None:
        self._watch, self._held, self._settle, self._resend = watch, weights, settle, resend
        # Name -> digest of weights that this rank does not use: writing the same values again is no change.
        self._idle = {name: watch.digest(name) for name in watch.names if name not in weights.names}
        self._turn = 0
        self._round_alike = True

    def words(self, scope: Scope) -> list[int]:
        """Return this rank's part of the message that compares a call; the group takes the maximum of each word.

        The first word says whether a weight was changed. Two words follow for each of ``HeldWeights.groups``: a digest
        of a few values and its negative. Their maxima are negatives of each other only if all digests are equal.
        """
        self._turn += 1
        words = [int(bool(self._watch.changed(scope)))]
        for names in self._held.groups:
            if names is None:
                words += [_NONE, _NONE]
                continue
            # Ranks that round differently never have equal values, so their digests are not compared.
            digest = self._watch.sample(names, self._turn) if self._round_alike else 0
            words += [digest, -digest]
        return words

    def check(self, comm: Communicator, scope: Scope, largest: Sequence[int]) -> None:
        """Refuse weights that differ between ranks; collective if ``largest``, equal on all ranks, shows that some may.

        Args:
            comm: the ranks to compare.
            scope: scope of the call.
            largest: the maximum over the ranks of each of ``words``: whether a weight was changed, then for each group
                of weights a digest and its negative.

        Raises:
            RequestError: on every rank; names the weights and the ranks.
        """
        any_changed, pairs = bool(largest[0]), zip(largest[1::2], largest[2::2], strict=True)
        # The largest digest of a group, and the negative of the smallest.
        differ = [group for group, (high, minus_low) in enumerate(pairs) if high != -minus_low]
        if any_changed or differ:
            suspects = [name for group in differ for name in self._held.groups[group] or ()]
            self._compare(comm, scope, suspects)
        # The weights are the same on all ranks: later calls ask only for changes from now on.
        self._watch.agreed(scope)

    def _compare(self, comm: Communicator, scope: Scope, suspects: Iterable[str]) -> None:
        """Compare tensors that are changed or suspected on any rank; rank 0 decides for all (collective over ``comm``).

        Raises:
            RequestError: on every rank: a tensor differs between ranks.
        """
        # Values that are still being sent to this rank belong to its weights.
        self._settle()
        changed, lost = self._watch.changed(scope), self._watch.lost()
        suspected = comm.gather_objects(sorted({*changed, *suspects}))
        names = comm.broadcast_object(None if suspected is None else sorted(set().union(*suspected)))
        facts = {name: self._facts(name, name in changed, name in lost) for name in names}
        answers = comm.gather_objects([_arithmetic(), facts])
        verdict: Any = None
        if answers is not None:
            equal = len({arithmetic for arithmetic, _ in answers}) == 1
            # In the model's order: the first name that differs is the one in the message.
            by_name = {
                name: [_RankFacts(*of_rank[name]) for _, of_rank in answers]
                for name in self._watch.names
                if name in names
            }
            any_lost = any(of_rank.lost for of_name in by_name.values() for of_rank in of_name)
            verdict = [_refusal(by_name, equal), any_lost, equal]
        refusal, overwritten, self._round_alike = comm.broadcast_object(verdict)
        if refusal is not None:
            raise RequestError(refusal)
        # The change is accepted: from now on, writing these values again is no change.
        self._idle |= {name: _RankFacts(*facts[name]).digest for name in changed if name in self._idle}
        if overwritten:
            self._resend()

    def _facts(self, name: str, changed: bool, lost: bool) -> list[Any]:
        """Return the fields of this rank's ``_RankFacts`` about a weight, in the form in which they are sent."""
        holds = name in self._held.names
        digest = self._watch.digest(name) if holds or changed else 0
        return [holds, changed and digest != self._idle.get(name), lost, digest]


@dataclass(frozen=True)
class _RankFacts:
    """What one rank reports about one weight; ranks that hold it must have equal digests.

    Attributes:
        holds: whether the rank computes with it.
        changed: whether it was changed on this rank since the last call, outside of the engine.
        lost: whether values that another rank sent have overwritten that change.
        digest: digest of its values; 0 if the rank neither holds nor changed it.
    """

    holds: bool
    changed: bool
    lost: bool
    digest: int


def _refusal(by_name: dict[str, list[_RankFacts]], round_alike: bool) -> str | None:
    """Return a message about weights that differ, None if there are none.

    Args:
        by_name: name of a weight -> the facts of each rank about it.
        round_alike: whether all ranks round alike, so that equal values are equal bits.
    """
    wrong = [name for name, ranks in by_name.items() if not _agree(ranks, round_alike)]
    if not wrong:
        return None
    ranks = by_name[wrong[0]]
    more = f" and {len(wrong) - 1} more" if wrong[1:] else ""
    values: dict[int, list[int]] = {}
    for rank, facts in enumerate(ranks):
        if facts.holds or facts.changed:  # others, which neither use nor changed it, have no digest of it
            values.setdefault(facts.digest, []).append(rank)
    changed = [rank for rank, facts in enumerate(ranks) if facts.changed]
    unchanged = [rank for rank, facts in enumerate(ranks) if facts.holds and not facts.changed]
    if changed:
        cause = f"changed on {named_ranks(changed)} since the last step"
        cause += f", but not on {named_ranks(unchanged)}" if unchanged else ", but not alike"
    else:
        cause = "changed through .data, or by gradients or optimizer states that were changed on some ranks only"
    differ = "; ".join(f"one value on {named_ranks(of)}" for of in values.values())
    return (
        f"ranks disagree: weight {wrong[0]!r}{more} ({differ}): {cause}; change weights alike on every rank, or load "
        f"them on every rank with engine.load_state_dict"
    )


def _agree(ranks: list[_RankFacts], round_alike: bool) -> bool:
    """Whether ranks that hold a weight have equal values or all changed it, and no other rank changed it alone.

    Args:
        ranks: the facts of each rank about the weight.
        round_alike: whether all ranks round alike, so that equal values are equal bits.
    """
    holders = [facts for facts in ranks if facts.holds]
    all_changed, any_changed = all(facts.changed for facts in holders), any(facts.changed for facts in holders)
    # A change that was overwritten on one rank and not made on all leaves ranks with different values.
    if any(facts.lost for facts in ranks) and not all_changed:
        return False
    if round_alike:
        # Ranks whose change was overwritten are left out: they are sent the owner's values again.
        if len({facts.digest for facts in holders if not facts.lost}) > 1:
            return False
    # Ranks that round differently never have equal bits; it can only be checked that all of them changed it.
    elif any_changed and not all_changed:
        return False
    digests = {facts.digest for facts in holders}
    # A rank may load a whole state, with weights that only others use: harmless if the holders changed theirs, too, or
    # have the same values.
    elsewhere = [facts for facts in ranks if facts.changed and not facts.holds]
    return any_changed or all(facts.digest in digests for facts in elsewhere)


def _arithmetic() -> str:
    """Return a text on which rounding depends: ranks on different processors may differ in the last bits."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} {device}"
