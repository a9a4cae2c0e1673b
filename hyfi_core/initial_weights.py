"""Initial weights of a part of a model, without the memory of the whole.

    meta build    conv1.weight  bn1.weight  …  fc.weight        no values: only the names and their order
    value build   conv1.weight  ░░░░░░░░░░  …  fc.weight        a tensor that is not needed loses its values as soon as
                                                                its module has become part of another

Random values come from one generator in the order of the modules, so all tensors have to be drawn, even if their values
are then forgotten. If a forgotten tensor is initialised again, as networks do in a loop over their modules, it is drawn
and forgotten again. If it is used in any other way, this build ends and the whole model is built.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from hyfi_core.process_memory import return_freed_now

_KEPT_BYTES = 32 << 20  # bytes that may be forgotten before their memory is returned to the system
_BUILDING = threading.Lock()  # one build at a time: the generator and the hooks are those of the process
_DRAWS = frozenset(
    {"normal_", "uniform_", "fill_", "zero_", "constant_", "ones_", "zeros_"}
    | {f"{kind}_{how}_" for kind in ("kaiming", "xavier") for how in ("normal", "uniform")}
)
"""Functions that set a tensor; how many random numbers they draw depends on its shape, not on its values."""
_READS = frozenset({"dim", "size", "numel", "stride", "ndimension", "is_floating_point"})
_ATTRIBUTES = frozenset({"shape", "dtype", "ndim", "requires_grad", "data"})
"""Attributes of a forgotten tensor that may be read; not its device: initialisations skip tensors on meta."""


class _ForgottenUsedError(RuntimeError):
    """A forgotten tensor was used in another way than being drawn again."""


class _Forgotten(torch.Tensor):
    """A tensor without values, which can be drawn again."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch on a tensor without values, if it needs none.

        It may read the tensor's shape or another attribute, or draw new values, which are dropped again.

        Raises:
            _ForgottenUsedError: the function does something else.
        """
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            # An attribute is read by ``__get__`` of its descriptor, which has the attribute's name.
            attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else None
            if name in _READS or attribute in _ATTRIBUTES:
                result = func(*args, **kwargs)
                return result.as_subclass(_Forgotten) if isinstance(result, torch.Tensor) else result
            forgotten = next((item for item in (*args, *kwargs.values()) if isinstance(item, _Forgotten)), None)
            tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
            # With a second tensor, the result could depend on that tensor's values.
            if name not in _DRAWS or forgotten is None or len(tensors) != 1:
                raise _ForgottenUsedError(name)
            # The values are drawn and dropped: the generator must advance as it does for the whole model.
            drawn = torch.empty_strided(forgotten.shape, forgotten.stride(), dtype=forgotten.dtype)
            func(
                *(drawn if item is forgotten else item for item in args),
                **{key: drawn if item is forgotten else item for key, item in kwargs.items()},
            )
            return forgotten


class _ForgottenParameter(_Forgotten, nn.Parameter):
    """A parameter without values."""


class InitialWeights:
    """The initial values of a model that is built without values, for ``parallelize(weights=…)``.

    Args:
        build: builds the model; the same each time, except for its random values.
        seed: seed of torch's generator before each build with values; a build leaves the generator as a build of the
            whole model would.

    Attributes:
        model: the model on the meta device.
    """

    def __init__(self, build: Callable[[], nn.Module], seed: int) -> None:
        self._build, self._seed = build, seed
        self._values: dict[str, torch.Tensor] = {}
        order = _Order(None)  # records all tensors
        # Registration hooks apply to all modules of the process, so only one build may install them at a time.
        with _BUILDING, torch.device("meta"), order.watching():
            self.model = build()
        named = _named(self.model)
        names: dict[int, set[str]] = {}
        for name, tensor in named.items():
            names.setdefault(id(tensor), set()).add(name)
        self._shapes = order.shapes
        # Names by place in the order of registration; a tensor that was replaced later has none.
        self._names = [names.get(id(tensor), set()) for tensor in order.tensors]

    def prepare(self, names: Collection[str]) -> None:
        """Build the model again with values, and keep those of the tensors with these names for later calls.

        Tensors with other names lose their values during the build. If it uses these values, the whole model is built.
        """
        needed_places = {place for place, of_place in enumerate(self._names) if not of_place.isdisjoint(names)}
        with _BUILDING:
            torch.manual_seed(self._seed)
            order = _Order(needed_places)
            try:
                with order.watching():
                    model = self._build()
                # With another order than in the first build, places would stand for other tensors.
                is_exact = order.shapes == self._shapes
            except _ForgottenUsedError:
                is_exact = False
            if not is_exact:  # the whole model, without forgetting
                torch.manual_seed(self._seed)
                model = self._build()
        self._values = {name: tensor for name, tensor in _named(model).items() if name in names}

    def __call__(self, name: str) -> torch.Tensor:
        """Return a tensor, and do not keep it.

        Raises:
            KeyError: it was not prepared, or has been returned before.
        """
        return self._values.pop(name).detach()


class _Order:
    """The parameters and buffers of a build, in the order in which modules register them.

    Args:
        wanted: positions in this order of the tensors whose values are kept; None: all are.

    Attributes:
        shapes: (shape, dtype) of each.
        tensors: the tensors in this order, if all are kept.
    """

    def __init__(self, wanted: Collection[int] | None) -> None:
        self._wanted = wanted
        self._thread = threading.get_ident()
        self.shapes: list[tuple[torch.Size, torch.dtype] | None] = []
        self.tensors: list[torch.Tensor | None] = []
        self._forgettable: set[int] = set()  # ids of tensors that are not wanted
        self._freed_bytes = 0  # since memory was last returned to the system

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which a model is built: hooks record its tensors, and forget those that are not wanted."""
        handles = [
            register_module_parameter_registration_hook(self._register),
            register_module_buffer_registration_hook(self._register),
            register_module_module_registration_hook(self._join),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _register(self, module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        """Record that a module gets a tensor and, if only some are wanted, whether it may be forgotten."""
        if threading.get_ident() != self._thread or isinstance(tensor, _Forgotten):
            return
        place = len(self.shapes)
        self.shapes.append(None if tensor is None else (tensor.shape, tensor.dtype))
        if self._wanted is None:
            self.tensors.append(tensor)
        elif tensor is not None and place in self._wanted:
            self._forgettable.discard(id(tensor))  # a tensor that was replaced and freed may have had the same id
        elif tensor is not None:
            self._forgettable.add(id(tensor))

    def _join(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """Forget the unneeded tensors of a module that becomes part of another, because it is initialised by then."""
        if threading.get_ident() != self._thread or self._wanted is None or child is None:
            return
        for part in child.modules():
            for tensors in (part._parameters, part._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None and id(tensor) in self._forgettable and not isinstance(tensor, _Forgotten):
                        tensors[key] = _forgotten(tensor)  # type: ignore[assignment]
                        self._forgettable.discard(id(tensor))
                        self._freed_bytes += tensor.nbytes
        if self._freed_bytes > _KEPT_BYTES:
            return_freed_now()
            self._freed_bytes = 0


def _forgotten(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without values that takes the place of this one in its module."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return torch.Tensor._make_subclass(_ForgottenParameter, empty, tensor.requires_grad)
    return empty.as_subclass(_Forgotten)


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> parameter or buffer; tied ones under each of their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
