"""Checks and comparisons with the same outcome on every rank of a group: all ranks refuse, or none does.

Arguments are compared before the first message that depends on them, and by one digest at every call.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import nn

from hyfi_core.comm.activity import named_ranks
from hyfi_core.comm.agreement.described import describe_function, describe_labels
from hyfi_core.comm.agreement.same_weights import SameWeights
from hyfi_core.comm.agreement.weight_watch import Scope, digest_of
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.batch_shapes import Shape
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.stored_state import StoredState

T = TypeVar("T")
_SAME_FACTOR = 1e-2
"""Relative difference below which factors count as equal: those of 16-bit gradients are rounded."""
# Larger factors count as this one. Times 2⁴⁰ (``_scale_words``) it is 2⁶⁰: within int64, its negative above
# ``_NO_FACTOR``.
_LARGEST_FACTOR = 2.0**20
_NO_FACTOR = -(2**61)
"""The word of an unknown factor: less than any other."""
_AUTOCAST = "torch.autocast around the call"
_INFERENCE = "torch.inference_mode around the call"


def agree(
    comm: Communicator,
    check: Callable[[], T],
    refusals: tuple[type[Exception], ...] = (RequestError,),
    error: type[Exception] = RequestError,
) -> T:
    """Return ``check()``; if any rank refuses, all raise the message of the first such rank (collective).

    Args:
        comm: the ranks that agree.
        check: may differ between ranks. After anything that a single rank may refuse, it must not communicate: the
            other ranks would wait for the one that refused. Functions that it calls may agree on their own refusals,
            as ``parallelize`` does.
        refusals: exceptions of ``check`` that are refusals; others are errors of this rank and propagate.
        error: raised on every rank.

    Raises:
        Exception: ``error``, on every rank, if ``check`` refused on any.
    """
    refusal, result = None, None
    try:
        result = check()
    except refusals as raised:
        # As text: gathered values are sent as JSON.
        refusal = str(raised) or type(raised).__name__
    gathered = comm.gather_objects(refusal)
    first = comm.broadcast_object(next((text for text in gathered if text is not None), None) if gathered else None)
    if first is not None:
        raise error(first)
    return result  # type: ignore[return-value]


def compare(comm: Communicator, facts: Mapping[str, str] | None) -> None:
    """Refuse facts that differ between ranks (collective; sends only a digest unless they differ).

    Args:
        comm: the ranks to compare.
        facts: name -> value, short texts; a missing name counts as different.
            None: this rank takes no part.

    Raises:
        RequestError: on every rank; names what differs first, with the value of each rank.
    """
    if comm.size == 1:
        return
    digest = hashlib.sha256(json.dumps(facts and sorted(facts.items())).encode()).hexdigest()
    digests = comm.gather_objects(digest)
    if comm.broadcast_object(len(set(digests)) == 1 if digests is not None else None):
        return
    gathered = comm.gather_objects(facts and dict(facts))
    difference = comm.broadcast_object(_first_difference(gathered) if gathered is not None else None)
    if difference is not None:
        raise RequestError(difference)


def _first_difference(ranks: list[dict[str, str] | None]) -> str | None:
    """Return a sentence about the first fact that differs between ranks, None if all are equal."""
    for name in dict.fromkeys(name for facts in ranks for name in facts or ()):
        holders: dict[str, list[int]] = {}
        for rank, facts in enumerate(ranks):
            if facts is None:
                continue
            holders.setdefault(facts.get(name, "not given"), []).append(rank)
        if len(holders) > 1:
            values = "; ".join(f"{value} on {named_ranks(numbers)}" for value, numbers in holders.items())
            return f"ranks disagree: {name} is {values}; pass the same on every rank"
    return None


def compare_requests(
    comm: Communicator,
    model: nn.Module,
    shape: Shape,
    plan: ParallelPlan,
    settings: Mapping[str, object],
) -> None:
    """Refuse calls of ``parallelize`` with different arguments (collective).

    Args:
        comm: all ranks of the plan.
        model: its structure, flags and dtypes are compared; weights may differ, because those of rank 0 are used.
        shape: shape of the batch; with ``plan.shares``, the number of images may differ between replicas.
        plan: every field is compared.
        settings: other settings that must be equal, by name.

    Raises:
        RequestError: on every rank; names what differs and on which ranks.
    """
    facts = {f"plan.{name}": str(value) for name, value in plan.to_json().items()}
    facts["shape"] = str(shape[1:] if plan.shares else shape)
    facts |= {name: str(value) for name, value in settings.items()}
    facts |= {"model": type(model).__name__, "torch": torch.__version__}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        facts[name] = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
    compare(comm, facts | _flags(model))


Changes = Mapping[tuple[str, str], str]
"""(path of a module, attribute) -> value, of attributes changed since the last call."""


def _describe_settings(optimizer: torch.optim.Optimizer | None) -> str:
    """Return an optimizer's class and the settings of its groups as text.

    Tensors among them are left out: reading those of a GPU would make every step wait for it.
    """
    if optimizer is None:
        return "none"
    groups = []
    for group in optimizer.param_groups:
        plain = {key: value for key, value in sorted(group.items()) if _is_plain(value)}
        groups.append(", ".join(f"{key}={value}" for key, value in plain.items()))
    return f"{type(optimizer).__name__}({'; '.join(groups)})"


def _is_plain(value: object) -> bool:
    """Whether a setting is a number, a text, None, or a tuple of these, such as Adam's ``betas``."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (int, float, str))


class CallConsensus:
    """Compares the calls of an engine between ranks: one message of a few numbers each.

    It compares the call, the images' shape, the modules' flags, the weights, and the program to run: a rank that
    captures the model again, because its state changed, would send messages that other ranks do not expect.

    Args:
        model: the model whose flags are compared.
        everyone: all ranks.
        replica: the ranks of this replica, which are given the same images.
        changes: returns the changes since the last call, for the message.
        weights: compares the weights.
        loss: the loss function; the values that it holds are compared, too.
        shares: whether the plan gives replicas different numbers of images.
        stages: number of stages of the plan; with several, the optimizer's groups may differ between ranks.
        no_autocast_on: device type; the caller must not set its autocast around a call. None: it may.
        judges: whether this rank computes the loss. Only such ranks compare it, because a loss may keep values when it
            is computed, such as its terms for a log.
    """

    def __init__(
        self,
        model: nn.Module,
        everyone: Communicator,
        replica: Communicator,
        changes: Callable[[], Changes],
        weights: SameWeights,
        loss: object,
        shares: bool = False,
        stages: int = 1,
        no_autocast_on: str | None = None,
        judges: bool = True,
    ) -> None:
        self._weights, self._no_autocast_on, self._judges = weights, no_autocast_on, judges
        self._loss, self._modules = loss, frozenset(model.modules())
        self._shares, self._stages = shares, stages
        # Number of optimizer steps, and the clipping norm and the factor of the last one: see `updated`.
        self._updates = 0
        self._max_norm: float | None = None
        self._factor: float | None = None
        # The digest of the last state loaded, as a fact to compare: see `loaded`.
        self._loaded: dict[str, str] = {}
        self._model = model
        self._everyone = everyone
        # With one replica the same object, so that `check_training` sees that one comparison is enough.
        self._replica = everyone if replica.size == everyone.size else replica
        self._changes = changes

    def updated(self, max_norm: float | None, factor: float | None = None) -> None:
        """Count an optimizer step.

        Args:
            max_norm: norm to which gradients were clipped; None: they were not.
            factor: factor by which the caller had multiplied this rank's gradients; None: not known.
        """
        self._updates, self._max_norm, self._factor = self._updates + 1, max_norm, factor

    def loaded(self, state: Mapping[str, torch.Tensor]) -> None:
        """Record a loaded state for the next comparison: with several stages, no other rank may have its weights."""
        if self._everyone.size > 1 and self._stages > 1:
            digest = state.identity if isinstance(state, StoredState) else f"{digest_of(state):08x}"
            self._loaded = {"the state that was loaded": f"one with digest {digest}"}

    def check_training(
        self, shape: Shape, program: str, labels: torch.Tensor, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Refuse training calls that differ between ranks (collective over all ranks).

        Args:
            shape: shape of the replica's batch.
            program: digest of the captured program to run; "" or "new" if there is none yet.
            labels: labels of the replica's batch.
            optimizer: its settings, and what was done with it, must be the same on all ranks.

        Raises:
            RequestError: on every rank; names what differs and on which ranks.
        """
        around = self._autocast_around()
        if torch.is_inference_mode_enabled():
            around |= {_INFERENCE: "on"}
        if self._everyone.size == 1:
            _refuse_modes(around)
            return
        settings = _describe_settings(optimizer) if self._stages == 1 else type(optimizer).__name__
        done = f"{settings}, {self._updates} updates, max_norm={self._max_norm}"
        facts = self._loaded | around | {"the optimizer": done}
        loss = {"the loss": describe_function(self._loss, self._modules)} if self._judges else None
        weights: Scope | None = "training"
        if self._replica is not self._everyone:  # replicas may have images of different shapes
            of_all = facts | {"the labels' shape for each image": f"{tuple(labels.shape[1:])} {labels.dtype}"}
            if not self._shares:
                of_all["a replica's number of images (set plan.shares for different numbers)"] = str(shape[0])
            self._check(self._everyone, "training", None, str(program == "new"), of_all, weights, loss)
            weights = None  # compared now
        facts |= {"labels": describe_labels(labels)}
        self._check(self._replica, "training", shape, program, facts, weights, loss)
        _refuse_modes(around)

    def check_evaluation(self, call: str, shape: Shape, program: str) -> None:
        """Refuse evaluation calls that differ between the ranks of a replica (collective over them).

        Args:
            call: name of the call.
            shape: shape of the images.
            program: digest of the captured program to run; "" or "new" if there is none yet.

        Raises:
            RequestError: on every rank; names what differs and on which ranks.
        """
        around = self._autocast_around()
        facts = self._loaded | around  # the last state loaded, and the caller's autocast
        self._check(self._replica, call, shape, program, facts, "evaluation")
        _refuse_modes(around)

    def _autocast_around(self) -> dict[str, str]:
        """Return the autocast that the caller has set around an engine without one, as a fact to compare; or none."""
        if self._no_autocast_on is None or not torch.is_autocast_enabled(self._no_autocast_on):
            return {}
        return {_AUTOCAST: str(torch.get_autocast_dtype(self._no_autocast_on))}

    def _check(
        self,
        comm: Communicator,
        call: str,
        shape: Shape | None,
        program: str,
        facts: Mapping[str, str] | None = None,
        weights: Scope | None = None,
        loss: Mapping[str, str] | None = None,
    ) -> None:
        """Refuse a call that differs between ranks: one maximum shows whether it does, its facts show in what.

        Args:
            comm: the ranks to compare.
            call: its name.
            shape: shape of the images; None: it may differ.
            program: digest of the program to run; "" or "new" if there is none yet.
            facts: name -> value of everything else that must be equal.
            weights: the scope in which weights are compared; None: they are not.
            loss: name -> value of what must be equal on ranks that compute the loss; None on other ranks.
        """
        if comm.size == 1:
            return
        modules, parameters = self._model.modules(), self._model.parameters()
        flags = bytes(m.training for m in modules) + bytes(p.requires_grad for p in parameters)
        number = zlib.crc32(f"{call} {shape} {program} {facts}".encode() + flags)
        scales = _scale_words(self._factor if weights == "training" else None)
        of_loss = zlib.crc32(str(loss).encode()) if loss else None
        judged = [_NO_FACTOR, _NO_FACTOR] if of_loss is None else [of_loss, -of_loss]
        words = self._weights.words(weights) if weights is not None else []
        # Each number beside its negative: one maximum gives the largest and the smallest of all ranks.
        extremes = torch.tensor([number, -number, *judged, *scales, *words])
        comm.all_reduce(extremes, "max")
        # ``minus_…``: a maximum of negatives, so the negative of the smallest.
        highest, minus_lowest, most, minus_least, largest, minus_smallest, *words = extremes.tolist()
        # ``most`` and ``minus_least`` are of digests of the loss; both are ``_NO_FACTOR`` if no rank has one.
        if highest != -minus_lowest or (most != minus_least and most != -minus_least):
            # Causes first, their consequences last: the message names the first difference.
            compare(comm, {"the call": call, "the images' shape": str(shape)} | _flags(self._model))
            compare(comm, self._describe_changes())
            compare(comm, {"the program that will run": program or "new"} | dict(facts or {}))
            compare(comm, loss)
        # The largest known factor minus the smallest.
        if largest + minus_smallest > _SAME_FACTOR * max(abs(largest), abs(minus_smallest)):
            self._refuse_factors(comm)
        if weights is not None:
            self._weights.check(comm, weights, words)

    def _refuse_factors(self, comm: Communicator) -> None:
        """Refuse gradients that ranks have multiplied by different factors; called if the factors differ."""
        question = (
            "the factor by which gradients were multiplied between engine.accumulate and engine.update (a rank has "
            "those of its own stages: clip by the norm of all with engine.update(max_norm=...))"
        )
        compare(comm, {question: "not known" if self._factor is None else f"{self._factor:.6g}"})

    def _describe_changes(self) -> dict[str, str]:
        return {
            f"{'.'.join(part for part in path if part)} (changed since the last call)": text
            for path, text in self._changes().items()
        }


def _refuse_modes(around: Mapping[str, str]) -> None:
    """Refuse a caller's autocast, which would not hold on ranks without pixels and in cells, and inference mode."""
    if _INFERENCE in around:
        raise RequestError(
            "a training step is called under torch.inference_mode, in which there are no gradients; leave that mode"
        )
    if _AUTOCAST in around:
        dtype = around[_AUTOCAST]
        raise RequestError(
            f"the engine is called under torch.autocast with {dtype}, but was created without autocast; pass "
            f"autocast={dtype} to parallelize, or call the engine outside of torch.autocast"
        )


def _scale_words(factor: float | None) -> list[int]:
    """Return a factor and its negative as integers, for a maximum over the group; an unknown factor is below all."""
    if factor is None:
        return [_NO_FACTOR, _NO_FACTOR]
    word = round(max(-_LARGEST_FACTOR, min(_LARGEST_FACTOR, factor)) * 2**40)
    return [word, -word]


def _flags(model: nn.Module) -> dict[str, str]:
    training = {f"{name or 'the model'}.training": str(m.training) for name, m in model.named_modules()}
    return training | {f"{name}.requires_grad": str(p.requires_grad) for name, p in model.named_parameters()}
