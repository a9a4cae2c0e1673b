"""Running statistics: buffers that a model changes in training, in the order of micro-batches.

With one direction, every stage processes micro-batches in order and updates buffers after each. With two, the ranks of
each direction process half of them: each forward then starts from zero, so that its result is the micro-batch's
contribution (momentum times its mean, or its mean for cumulative averages), and after the step both directions fold all
contributions in micro-batch order, as in one process.

Replicas have other images, and so other statistics. Those of replica 0 count, as in DDP: after the step all replicas
take them over, so that each step starts, and each replica predicts, with the statistics that are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import nn

from hyfi_core.capture.program import Operator, Program
from hyfi_core.capture.released import device_of, named_tensors
from hyfi_core.comm.base import Communicator, Message
from hyfi_core.errors import RequestError
from hyfi_core.rules.batch_norm import has_live_statistics
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.lowered_model import HostedStage, LoweredModel

HostedStages = Mapping[tuple[int, int], HostedStage]


class FollowingStatistics:
    """Buffers of one direction: each forward reads what the one before has changed.

    Args:
        buffers: those of the model by all of their names.
        apart: whether to change copies until ``publish``: some cells may still read the old values.
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor], apart: bool = False) -> None:
        self._own, self._buffers = buffers, _copies(buffers) if apart else buffers

    def given(self, stage: HostedStage) -> dict[str, torch.Tensor]:
        """Return value name -> buffer, for one forward."""
        return {value: self._buffers[name] for value, name in stage.ranked.program.buffers.items()}

    def changed(
        self, key: tuple[int, int], microbatch: int, stage: HostedStage, values: Mapping[str, torch.Tensor]
    ) -> None:
        """Store the buffers that a forward has changed."""
        mutations = stage.ranked.program.mutations.items()
        _store([(self._buffers[name], values[value]) for name, value in mutations])

    def finish(self) -> None:
        """Do nothing."""

    def publish(self) -> None:
        """Copy the buffers to the model, if these are copies."""
        _publish(self._own, self._buffers)


class FoldedStatistics:
    """Buffers of two directions: contributions of micro-batches are kept, exchanged and folded in order.

    Args:
        model: the user's module.
        hosted: the stages of this rank.
        peers: (stage, direction) of this rank -> the rank that holds the same part in the other direction.
        comm: the ranks of the plane.
        microbatches: number of micro-batches of both directions together.
        apart: whether copies are changed until ``publish``.

    Raises:
        RequestError: a buffer is changed by anything other than a batch norm.
    """

    def __init__(
        self,
        model: nn.Module,
        hosted: HostedStages,
        peers: Mapping[tuple[int, int], int],
        comm: Communicator,
        microbatches: int,
        apart: bool = False,
    ) -> None:
        self._model = model
        self._own: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
        self._buffers = _copies(self._own) if apart else self._own  # those that `finish` changes
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._hosted = hosted
        self._peers = peers
        self._comm = comm
        self._microbatches = microbatches
        self._contributions: dict[tuple[str, int], torch.Tensor] = {}  # (buffer, micro-batch) -> its contribution
        self._calls: dict[str, int] = {}  # buffer -> how often a forward changes it
        for stage in hosted.values():
            self._calls |= _calls(stage.ranked.program, self._modules)
            for name in stage.ranked.program.mutations:
                self._check(name)

    def given(self, stage: HostedStage) -> dict[str, torch.Tensor]:
        """Return value name -> buffer, for one forward: zeros for those that it changes."""
        program = stage.ranked.program
        return {
            # Starting from zero, a forward leaves only its own contribution, already multiplied by the momentum.
            value: torch.zeros_like(self._buffers[name]) if name in program.mutations else self._buffers[name]
            for value, name in program.buffers.items()
        }

    def changed(
        self, key: tuple[int, int], microbatch: int, stage: HostedStage, values: Mapping[str, torch.Tensor]
    ) -> None:
        """Keep a micro-batch's contribution."""
        for name, value in stage.ranked.program.mutations.items():
            self._contributions[name, microbatch] = values[value].detach().clone()

    def finish(self) -> None:
        """Exchange the contributions of both directions, and fold them."""
        self._swap()
        names = {name for stage in self._hosted.values() for name in stage.ranked.program.mutations}
        with torch.no_grad():
            self._fold(names)
        self._contributions.clear()

    def publish(self) -> None:
        """Copy the buffers to the model."""
        _publish(self._own, self._buffers)

    def _check(self, name: str) -> None:
        """Refuse a buffer that is not a running statistic of a norm: its updates cannot be folded in order."""
        path, _, key = name.rpartition(".")
        module = self._modules[path]
        is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
        # ``_calls`` has no cumulative averages (momentum None): a forward changes them as often as their counter.
        is_known = name in self._calls or (is_norm and module.momentum is None and _counter_of(name) in self._calls)
        if not is_norm or not is_known or key not in ("running_mean", "running_var", "num_batches_tracked"):
            raise RequestError(
                f"buffer {name!r} of {type(module).__name__} changes in training, but its updates have no defined "
                f"order in a schedule of two directions; use a schedule of one direction, or keep such buffers in "
                f"batch norms only"
            )

    def _swap(self) -> None:
        """Exchange the statistics of all micro-batches with the rank that has the same part in the other direction."""
        # Direction d has the micro-batches [d · half, (d + 1) · half).
        half = self._microbatches // 2
        sends, receives, arriving = [], [], []
        for key in sorted(self._hosted):
            direction = key[1]
            mine = range(direction * half, (direction + 1) * half)
            if self._peers[key] != self._comm.rank:
                names = sorted(self._hosted[key].ranked.program.mutations)
                # One message for each dtype: both ends concatenate micro-batches, and names in them, in the same order.
                for _, group in self._by_dtype(names):
                    flat = torch.cat([self._contributions[name, m].reshape(-1) for m in mine for name in group])
                    sends.append(Message(self._peers[key], flat))
        for key in sorted(self._hosted, key=lambda key: (key[0], 1 - key[1])):  # in the order in which peers send
            direction = key[1]
            theirs = range((1 - direction) * half, (2 - direction) * half)
            if self._peers[key] != self._comm.rank:
                names = sorted(self._hosted[key].ranked.program.mutations)
                for dtype, group in self._by_dtype(names):
                    count = sum(self._buffers[name].numel() for name in group) * half
                    flat = torch.empty(count, dtype=dtype, device=self._buffers[group[0]].device)
                    receives.append(Message(self._peers[key], flat))
                    arriving.append((flat, group, theirs))
        self._comm.exchange(sends, receives).wait()
        for flat, group, theirs in arriving:
            parts = iter(flat.split([self._buffers[name].numel() for _ in theirs for name in group]))
            for m in theirs:
                for name in group:
                    self._contributions[name, m] = next(parts).view(self._buffers[name].shape)

    def _by_dtype(self, names: Sequence[str]) -> Iterable[tuple[torch.dtype, list[str]]]:
        """Return (dtype, names of the buffers that have it), in one order on all ranks."""
        dtypes = sorted({self._buffers[name].dtype for name in names}, key=str)
        return [(dtype, [name for name in names if self._buffers[name].dtype == dtype]) for dtype in dtypes]

    def _fold(self, names: set[str]) -> None:
        """Fold the contributions of all batch norms, counters first: cumulative averages depend on them."""
        counters = [name for name in sorted(names) if name.endswith("num_batches_tracked")]
        averages = [name for name in sorted(names) if name not in counters]
        modules = {name: self._modules[name.rpartition(".")[0]] for name in averages}
        for microbatch in range(self._microbatches):
            if counters:
                torch._foreach_add_(*self._pairs(counters, microbatch))
            kinds: dict[tuple[float | None, int], list[str]] = {}
            for name, module in modules.items():
                kinds.setdefault((module.momentum, self._calls.get(name, 0)), []).append(name)
            for (momentum, calls), alike in kinds.items():
                if momentum is not None:
                    running, added = self._pairs(alike, microbatch)
                    # Each call of the norm multiplies the earlier value by (1 - momentum).
                    torch._foreach_mul_(running, (1.0 - momentum) ** calls)
                    torch._foreach_add_(running, added)
                    continue
                for name in alike:
                    # A contribution, from a forward that began with a counter of zero, is the mean over its calls.
                    counter = _counter_of(name)
                    factor = self._calls[counter] / float(self._buffers[counter])
                    self._buffers[name].mul_(1.0 - factor).add_(self._contributions[name, microbatch] * factor)

    def _pairs(self, names: Sequence[str], microbatch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the buffers of these names, and a micro-batch's contributions to them."""
        return [self._buffers[name] for name in names], [self._contributions[name, microbatch] for name in names]


def _counter_of(name: str) -> str:
    """Return the name of the counter of a running statistic's norm."""
    return f"{name.rpartition('.')[0]}.num_batches_tracked".lstrip(".")


def _calls(program: Program, modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return buffer -> how often a forward changes it: once for each call of its norm.

    Cumulative averages, computed by other operators, are missing: a forward changes them as often as their counter.

    Args:
        program: a stage.
        modules: name -> module of the model.
    """
    makers = {output: op for op in program.operators for output in op.outputs if output is not None}
    calls = {}
    for name, value in program.mutations.items():
        module = modules[name.rpartition(".")[0]]
        momentum, count = module.momentum if isinstance(module, nn.modules.batchnorm._NormBase) else None, 0
        # Go back from the new value, through the operators that made it, to the buffer.
        while (op := makers.get(value)) is not None:
            if op.text == "aten.add.Tensor" or has_live_statistics(op):
                count += 1
            elif not _is_of_update(op, momentum):
                break
            # In these operators, the position of the new value among outputs is that of the old one among arguments.
            value = op.args[op.outputs.index(value)].name
        if value in program.buffers:
            calls[name] = count
    return calls


def _is_of_update(op: Operator, momentum: float | None) -> bool:
    """Whether an operator belongs, besides its sum, to an instance norm's update, which is captured as arithmetic."""
    if op.text == "aten.mul.Tensor":
        return momentum is not None and bool(op.args[1] == 1.0 - momentum)
    return op.text == "aten.expand.default"


def unsaved_buffers(model: nn.Module, lowered: LoweredModel) -> set[str]:
    """Return the buffers that forwards change and that are not in the ``state_dict`` (``persistent=False``)."""
    lost = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    return lost & set(lowered.program.mutations)


class ReplicaBuffers:
    """The buffers that forwards of one lowered model change, which all replicas take over from replica 0.

    Creation is collective over all trainers.

    Args:
        model: the user's module.
        lowered: its stages.
        groups: the plan's groups.
        replicas: number of replicas.
    """

    def __init__(self, model: nn.Module, lowered: LoweredModel, groups: Groups, replicas: int) -> None:
        self._shared: list[tuple[Communicator, list[torch.Tensor]]] = []  # users in all replicas, buffers of one dtype
        named = dict(model.named_buffers(remove_duplicate=False))
        # By id, because a buffer may have several names.
        stages_of: dict[int, set[int]] = {}
        for stage, names in enumerate(lowered.buffers if replicas > 1 else ()):
            for name in names:
                stages_of.setdefault(id(named[name]), set()).add(stage)
        changed = {id(named[name]): named[name] for name in sorted(lowered.program.mutations)}
        by_users: dict[frozenset[int], list[torch.Tensor]] = {}  # ranks that use a buffer -> buffers
        for key, buffer in changed.items():
            if key in stages_of:
                by_users.setdefault(groups.users(stages_of[key]), []).append(buffer)
        # One broadcast by replica 0 for each set of users; sorted, because ``reduction`` is collective and may create a
        # group.
        for users in sorted(by_users, key=sorted):
            comm = groups.reduction(users)
            if comm is not None:
                for dtype in sorted({buffer.dtype for buffer in by_users[users]}, key=str):
                    self._shared.append((comm.of("reduce"), [b for b in by_users[users] if b.dtype == dtype]))

    @torch.no_grad()
    def take_over(self) -> None:
        """Overwrite the buffers with those of replica 0 (collective): one message for each dtype."""
        for comm, buffers in self._shared:
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            comm.broadcast(flat)
            # Rank 0 of the group, the first of replica 0 that uses them, has sent its own.
            if comm.rank:
                pieces = flat.split([buffer.numel() for buffer in buffers])
                _store([(buffer, piece.view(buffer.shape)) for buffer, piece in zip(buffers, pieces, strict=True)])


class StageTensors:
    """Knows which ranks have the new values of tensors that one stage changes and other stages read in another mode.

    For example a counter of the root module: the first stage counts in training, the last one reads it in evaluation;
    or weights of the first stage, which the last one uses in evaluation only.

    Args:
        model: the user's module.
        groups: the plan's groups.
        owner: returns the rank of a plane that saves a tensor.
        updated_on: name of a parameter -> the ranks that have its new values after an update.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Groups,
        owner: Callable[[str], int],
        updated_on: Mapping[str, frozenset[int]],
    ) -> None:
        self._model, self._groups, self._owner, self._updated_on = model, groups, owner, updated_on
        self._users = lru_cache(maxsize=None)(groups.users)  # asked for each tensor in each step
        self._known_on: dict[str, frozenset[int]] = {}  # ranks with the new value; tensors not listed: all ranks

    def changed(self, lowered: LoweredModel) -> None:
        """Record that a step has changed buffers; send them to the ranks that save them (collective over planes)."""
        changed = [name for name in lowered.program.mutations if name in lowered.stages_of]
        self._known_on |= {name: self._users(lowered.stages_of[name]) for name in changed}
        self.send([name for name in changed if self._owner(name) not in self._known_on[name]])

    def updated(self) -> None:
        """Record that the optimizer has changed parameters."""
        self._known_on |= self._updated_on

    def missing(self, lowered: LoweredModel) -> list[str]:
        """Return the tensors that stages read on ranks without the new value; the same on every rank."""
        stages = lowered.stages_of
        return [
            name for name, ranks in self._known_on.items() if name in stages and not self._users(stages[name]) <= ranks
        ]

    @torch.no_grad()
    def send(self, names: Iterable[str]) -> None:
        """Broadcast tensors whose new values only the ranks of ``_known_on`` have (collective over planes)."""
        ordered = sorted(names)
        named = named_tensors(self._model) if ordered else {}  # this goes through the whole model
        for name in ordered:
            tensor = named[name]
            # A rank that has released the tensor takes part in the broadcast all the same.
            value = torch.empty_like(tensor, device=device_of(self._model)) if tensor.is_meta else tensor.detach()
            self._groups.plane.broadcast(value, root=min(self._known_on.pop(name)))


def _copies(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of buffers by name; one with two names is copied once."""
    copies = {id(buffer): buffer.detach().clone() for buffer in buffers.values()}
    return {name: copies[id(buffer)] for name, buffer in buffers.items()}


def _publish(own: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
    """Copy ``buffers`` to ``own``, unless both are the same mapping."""
    if own is not buffers:
        _store([(own[name], value) for name, value in buffers.items()])


@torch.no_grad()
def _store(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy values to buffers, given as (buffer, value).

    Pairs with the same dtypes are copied together: on a GPU, one kernel instead of three for each batch norm.
    """
    kinds: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for buffer, value in pairs:
        kinds.setdefault((buffer.dtype, value.dtype), []).append((buffer, value))
    # ``_foreach_copy_`` is one kernel only if all pairs have the same two dtypes.
    for alike in kinds.values():
        buffers, values = zip(*alike, strict=True)
        torch._foreach_copy_(buffers, values)
