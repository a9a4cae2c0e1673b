"""Parameter ownership: which parameters and buffers a rank updates, and how they are gathered on rank 0."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import torch
from torch import nn

from hyfi_core.capture.released import named_tensors
from hyfi_core.comm.agreement.agree import agree
from hyfi_core.comm.agreement.same_weights import HeldWeights
from hyfi_core.comm.base import Message
from hyfi_core.errors import RequestError
from hyfi_core.memory_overlap import overlapping
from hyfi_core.runtime.calls.local_use import local_state
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.lowered_model import LoweredModel, StageNames
from hyfi_core.runtime.saving.shares import deal
from hyfi_core.stored_state import PreparedWeights, Weights, tensor_reader


class ParameterOwnership:
    """The owners of the model's parameters and buffers; the same on every rank.

    Args:
        model: the user's module.
        lowered: its stages.
        groups: the plan's groups.
        device: device of tensors that are gathered.
    """

    def __init__(self, model: nn.Module, lowered: StageNames, groups: Groups, device: torch.device) -> None:
        self._model, self._device = model, device
        self._groups = groups
        self._stages = _stages_by_name(model, lowered)
        self._named = dict(model.named_parameters(remove_duplicate=False))
        self._holders = {name: groups.holders(stages) for name, stages in self._stages.items()}
        rank = groups.plane.rank
        mine = [p for name, p in model.named_parameters() if rank in self._holders[name]]
        trains_nothing = any(p.requires_grad for p in model.parameters()) and not any(p.requires_grad for p in mine)
        # Optimizers refuse empty lists, and the user's function may leave out frozen parameters.
        self._optimized = [*mine, self._placeholder()] if trains_nothing or not mine else mine
        self._writers = self._writer_of_each()

    def optimized(self) -> list[nn.Parameter]:
        """Return the parameters that this rank's optimizer updates, in the model's order.

        Frozen ones are included: optimizers skip parameters without gradient, and they may be unfrozen later. A rank
        that has none to train gets an empty parameter, because optimizers refuse empty lists.
        """
        return self._optimized

    def counted(self) -> list[nn.Parameter]:
        """Return the parameters that this rank counts in sums over the model: each is counted by one rank."""
        rank = self._groups.plane.rank
        return [p for name, p in self._model.named_parameters() if rank == min(self._holders[name])]

    def held(self) -> HeldWeights:
        """Return the weights with which this rank computes, and those that it updates with others, to compare ranks."""
        rank = self._groups.plane.rank
        names = {name for name, stages in self._stages.items() if rank in self._groups.users(stages)}
        updated: dict[frozenset[int], list[str]] = {}
        for name, _ in self._model.named_parameters():
            updated.setdefault(self._holders[name], []).append(name)
        groups = [updated[ranks] if rank in ranks else None for ranks in sorted(updated, key=sorted)]
        return HeldWeights(names, groups)

    def updated_on(self) -> dict[str, frozenset[int]]:
        """Return name of a parameter -> the ranks of a plane that have its new values after an update."""
        return {name: self._groups.users(self._stages[name]) for name in self._named}

    def check_trained(self, lowered: LoweredModel) -> None:
        """Refuse parameters that other stages train now: the optimizers of their ranks do not have them.

        Raises:
            RequestError: on every rank, such as after an attribute has switched on a branch that was never used.
        """
        used = used_stages(self._model, lowered)
        for name in self._named:
            if name in lowered.trained and self._groups.holders(used[name]) != self._holders[name]:
                raise RequestError(
                    f"{name!r} of the model is trained by stages {sorted(used[name])} of the plan now, but belonged to "
                    f"stages {sorted(self._stages[name])} when the engine was created; set attributes and "
                    f"mode (train, eval) back, or create an engine of a new module that has these before, and load "
                    f"what engine.save(folder) wrote, or use a plan of one stage"
                )

    def missing(self) -> str | None:
        """Return the first name of a parameter or buffer that only stages on other ranks use; None without one."""
        rank = self._groups.plane.rank
        return next((name for name, stages in self._stages.items() if rank not in self._groups.users(stages)), None)

    def owned_names(self) -> list[str]:
        """Return the entries of the ``state_dict`` that this rank writes; each is written by one rank.

        Parameters are dealt over all ranks that update them, of all replicas; buffers are those of replica 0.
        """
        rank = self._groups.all.rank
        return [name for name in local_state(self._model) if self._writers.get(name, self.owner(name)) == rank]

    def owned_buffers(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the buffers among ``names`` that this rank writes, not copied; each has one writer."""
        named = dict(self._model.named_buffers(remove_duplicate=False))
        return {name: named[name] for name in sorted(names) if self.owner(name) == self._groups.all.rank}

    def here(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a ``state_dict`` with tensors on the meta device in place of those that this rank has released."""
        released = {name for name, tensor in named_tensors(self._model).items() if tensor.is_meta}
        result = OrderedDict((name, t.to("meta") if name in released else t) for name, t in state.items())
        if hasattr(state, "_metadata"):  # versions of modules, which some use to convert or check a loaded state
            result._metadata = state._metadata  # type: ignore[attr-defined]
        return result

    def gather_gradients(self) -> dict[str, torch.Tensor] | None:
        """Return copies of all gradients on rank 0, None elsewhere."""
        names = [name for name, p in self._model.named_parameters() if p.requires_grad]
        gradients: dict[str, torch.Tensor] = {}
        for name in names:
            grad = self._named[name].grad
            if grad is not None and self.owner(name) == self._groups.all.rank:
                gradients[name] = grad
        names_of_ranks = self._groups.all.gather_objects([name for name in gradients if self.owner(name) != 0])
        # Messages between two ranks match in order, and each owner sends in the order of its own names.
        order = [name for part in names_of_ranks for name in part] if names_of_ranks is not None else list(gradients)
        return self._gather(order, gradients, dict[str, torch.Tensor](self._named), names)

    def gather_state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return a copy of the user's model's own ``state_dict`` on rank 0, None elsewhere."""
        state = local_state(self._model)
        names = [name for name in state if self.owner(name) != 0]
        return self._gather(names, state, state, list(state))

    def _gather(
        self, names: Iterable[str], mine: dict[str, torch.Tensor], like: dict[str, torch.Tensor], order: list[str]
    ) -> dict[str, torch.Tensor] | None:
        """Gather tensors from their owners on rank 0; None elsewhere (collective).

        Args:
            names: names of tensors to send, in order: on rank 0 all that other ranks own, elsewhere at least its own.
            mine: name -> tensor, of all that this rank owns.
            like: name -> tensor of the shape and dtype that rank 0 receives.
            order: names in the order of the result; names that no rank owns or sends are left out.
        """
        comm = self._groups.all
        if comm.rank != 0:
            sends = [Message(0, mine[n].detach().contiguous()) for n in names if self.owner(n) == comm.rank]
            comm.exchange(sends, []).wait()
            return None
        received = {n: self._room(like[n]) for n in names}
        comm.exchange([], [Message(self.owner(n), tensor) for n, tensor in received.items()]).wait()
        own = {n: tensor.detach().clone() for n, tensor in mine.items() if self.owner(n) == 0}
        return {n: received[n] if n in received else own[n] for n in order if n in received or n in own}

    def _writer_of_each(self) -> dict[str, int]:
        """Return name of a parameter -> the rank that writes it to checkpoints; tied names have the same rank."""
        sizes: dict[frozenset[int], dict[str, int]] = {}
        first_names = {}
        for name, parameter in self._model.named_parameters():
            sizes.setdefault(self._holders[name], {})[name] = parameter.numel() * parameter.element_size()
            first_names[id(parameter)] = name
        # Holders in all planes and replicas have the same weights, so all of them share the writing.
        first_ranks = range(0, self._groups.all.size, self._groups.placement.size)
        writers: dict[str, int] = {}
        for holders, bytes_of in sizes.items():
            writers |= deal(bytes_of, [first + rank for first in first_ranks for rank in sorted(holders)])
        return {name: writers[first_names[id(parameter)]] for name, parameter in self._named.items()}

    def owner(self, name: str) -> int:
        """Return the rank of replica 0 that owns a parameter or buffer; 0 for other names."""
        return min(self._holders[name]) if name in self._holders else 0

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor; this rank may have released its own."""
        return torch.empty(like.shape, dtype=like.dtype, device=self._device if like.is_meta else like.device)

    def _placeholder(self) -> nn.Parameter:
        """Return an empty parameter for the optimizer of a rank that trains none."""
        return nn.Parameter(torch.zeros(0, device=self._device))


def used_stages(model: nn.Module, lowered: StageNames) -> dict[str, set[int]]:
    """Return name of a parameter or buffer -> stages that use it; names that no operator uses are missing.

    Names of one tensor (tied weights) have the same stages.
    """
    named = named_tensors(model)
    by_tensor: dict[int, set[int]] = {}
    for stage, names in enumerate(lowered.names):
        for name in names:
            by_tensor.setdefault(id(named[name]), set()).add(stage)
    return {name: by_tensor[id(tensor)] for name, tensor in named.items() if id(tensor) in by_tensor}


def refuse_shared_memory(model: nn.Module, lowered: LoweredModel, groups: Groups) -> None:
    """Refuse different tensors in the same memory if ranks have only one of them: they would no longer be equal.

    Raises:
        RequestError: such as after ``p.data = q.data`` for weights of two stages.
    """
    named = named_tensors(model)
    # Buffers that no forward changes, such as two views of one mask, stay equal.
    changing = {name for name, t in named.items() if isinstance(t, nn.Parameter) or name in lowered.program.mutations}
    stages = _stages_by_name(model, lowered)
    for first, second in overlapping(named):
        if changing.isdisjoint((first, second)):
            continue
        first_ranks, second_ranks = ((groups.holders(stages[n]), groups.users(stages[n])) for n in (first, second))
        if first_ranks != second_ranks:
            raise RequestError(
                f"{first!r} and {second!r} of the model are different tensors in the same memory, as after "
                f"p.data = q.data, but ranks of different stages train them; tie them as one tensor "
                f"(module.weight = other.weight), or choose cuts that keep both in one stage"
            )


def read_values(
    model: nn.Module, stages: Mapping[str, Set[int]], groups: Groups, weights: Weights, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return name -> value, for this rank's tensors on the meta device; tied ones by their first name (collective).

    One of the ranks that need a tensor reads it, and sends it to the others.

    Args:
        model: the user's module.
        stages: name -> stages that use it; a tensor without stages is read for all ranks.
        groups: the plan's groups.
        weights: returns the values by name.
        device: device on which the values are placed.

    Raises:
        RequestError: on every rank: a tensor is missing or has another shape.
    """
    names: dict[int, list[str]] = {}
    named = named_tensors(model)
    for name, tensor in named.items():
        if tensor.is_meta:
            names.setdefault(id(tensor), []).append(name)
    aliases_by_users: dict[frozenset[int], list[list[str]]] = {}
    for aliases in names.values():
        users = groups.users(stages.get(aliases[0]) or range(groups.placement.stages))
        aliases_by_users.setdefault(users, []).append(aliases)
    # Sorted, because ``reduction`` is collective and may create a group.
    shared = [(groups.reduction(users), aliases_by_users[users]) for users in sorted(aliases_by_users, key=sorted)]
    needed = [(comm, aliases) for comm, tensors in shared if comm is not None for aliases in tensors]
    values = {}
    for _, aliases in needed:
        like = named[aliases[0]]
        # With the strides of the model: a weight in channels-last keeps its format.
        values[aliases[0]] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)

    def read() -> None:
        """Read the tensors for which this rank is the first of those that need them."""
        if isinstance(weights, PreparedWeights):
            weights.prepare({name for comm, aliases in needed if comm.rank == 0 for name in aliases})
        reader = tensor_reader(weights)
        for comm, aliases in needed:
            if comm.rank == 0:
                _read_into(values[aliases[0]], reader, aliases)

    # Before the first broadcast: a rank that could not read would leave the others waiting in it.
    agree(groups.all, read)
    for comm, aliases in needed:
        comm.broadcast(values[aliases[0]])
    return values


@torch.no_grad()
def _read_into(value: torch.Tensor, read: Callable[[str], torch.Tensor], aliases: Sequence[str]) -> None:
    """Read a tensor into ``value``, under the first of its names that ``read`` has: files may store tied ones once."""
    for name in aliases:
        try:
            read_value = read(name)
        except (RequestError, KeyError) as error:
            if name == aliases[-1]:
                raise RequestError(
                    f"{name!r} of the model is on the meta device, and weights has no values for it ({error}); buffers "
                    f"that are not persistent are not in files: build them outside of torch.device('meta')"
                ) from error
            continue
        if not isinstance(read_value, torch.Tensor) or read_value.shape != value.shape:
            description = tuple(read_value.shape) if isinstance(read_value, torch.Tensor) else type(read_value).__name__
            raise RequestError(
                f"weights: {name!r} is {description}, but that of the model has shape {tuple(value.shape)}"
            )
        value.copy_(read_value)
        return


def _stages_by_name(model: nn.Module, lowered: StageNames) -> dict[str, set[int]]:
    """Return name of a parameter or buffer -> stages to which it belongs.

    Tensors not used by any operator (a counter in evaluation mode) belong to the stage of their module, or to the first
    stage.
    """
    used = used_stages(model, lowered)
    by_module: dict[str, set[int]] = {}
    for stage, names in enumerate(lowered.names):
        for name in names:
            by_module.setdefault(name.rpartition(".")[0], set()).add(stage)
    return {name: used.get(name) or by_module.get(name.rpartition(".")[0]) or {0} for name in named_tensors(model)}


def made_optimizer(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None, parameters: list[nn.Parameter], staged: bool
) -> torch.optim.Optimizer | None:
    """Call the user's function and check the optimizer that it returns; None without a function.

    Args:
        make: the function. It may choose among the parameters, such as matrices for ``torch.optim.Muon``.
        parameters: parameters of this rank.
        staged: whether there are several stages. If the function chooses none of this rank's parameters, it is called
            again with empty ones of 1 to 5 dims added, because optimizers refuse empty lists.

    Raises:
        RequestError: the function raises ValueError, or returns no optimizer or one that needs a closure.
    """
    if make is None:
        return None
    device = parameters[0].device
    try:
        try:
            optimizer = make(parameters)
        except ValueError as error:
            if not staged:
                raise
            # Perhaps it chose no parameter: Muon takes matrices only, and this stage may have convolutions only.
            empty = [nn.Parameter(torch.zeros((0,) * n, device=device)) for n in range(1, 6)]
            try:
                optimizer = make([*parameters, *empty])
            except ValueError:
                raise error from None  # it fails for another reason
    except ValueError as error:
        raise RequestError(
            f"optimizer raised ValueError: {error}; on this rank it was passed {len(parameters)} parameters, those of "
            f"the rank's own stages"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RequestError(
            f"optimizer returned {type(optimizer).__name__}; it must return a torch.optim.Optimizer for the "
            f"parameters that it is passed"
        )
    # LBFGS: a closure runs forward and backward at moments that other ranks do not know.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RequestError(
            f"{type(optimizer).__name__} evaluates the model several times in one step (closure), which is not "
            f"supported; use a gradient-based optimizer such as SGD, Adam or AdamW"
        )
    return optimizer
