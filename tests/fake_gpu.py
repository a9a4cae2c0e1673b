"""A GPU made of CPU tensors: what host code may not do with a device fails here, whatever order work completes in.

    with FakeGpu(seed) as gpu:
        model = model.to("cuda")                 tensors say that they are on cuda:0, and compute as usual
        with gpu.no_synchronisation():           the host may not wait for the device here
            engine.accumulate(images, labels)

Modelled: streams and events as vector clocks; copies that run later than they are issued, in an order drawn by seed,
and whose target holds garbage until then; blocking copies and reads of values, which make the host wait. Every access
is checked against the clocks: a stream or the host that touches memory which another stream may still be writing is an
error in every run, also where the drawn order would hide it. Memory that is freed while another stream may use it is an
error unless ``record_stream`` was called. Threads that begin before it is entered are not seen, but read the garbage.

Time of the device passes only where a test says so (``Stream.time_s``); events measure it as those of CUDA do.

Not modelled: kernels take no time, devices other than one, the speed of anything.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._prims_common import suggest_memory_format
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
_GARBAGE = 0xA5
_RUN_PROBABILITY = 0.2
_POLLS = 3
"""An event is complete after at most so many queries."""
_READS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "masked_select",
    "is_nonzero",
    "_unique2",
    "unique_dim",
    "bincount",
}
_FROM_PYTHON = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)

Clock = dict[int, int]


def batch_norm_backward_elemt(
    dy: Any, x: Any, mean: Any, inverse: Any, weight: Any, sum_dy: Any, sum_dy_xmu: Any, count: Any
) -> Any:
    """``torch.batch_norm_backward_elemt``, which a CPU lacks, as PyTorch's SyncBatchNorm uses it."""
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(dy.dim())
    if (order and dy.is_contiguous(memory_format=order)) or (dy.is_contiguous() and dy.stride(1) == 1):
        # ATen's ``batch_norm_backward_elemt_cuda`` looks at the cotangent alone, and reads the map as if it were, too.
        x = torch.as_strided(x, dy.shape, dy.stride())
    total = int(count.sum())
    shape = (1, -1, *[1] * (x.dim() - 2))
    mean, inverse, sum_dy, sum_dy_xmu = (value.view(shape) for value in (mean, inverse, sum_dy, sum_dy_xmu))
    scale = 1.0 if weight is None else weight.view(shape)
    return (dy - sum_dy / total - (x - mean) * inverse.square() * sum_dy_xmu / total) * inverse * scale


def batch_norm_elemt(x: Any, weight: Any, bias: Any, mean: Any, inverse: Any, eps: float) -> Any:
    """``torch.batch_norm_elemt``, which a CPU lacks, too."""
    scale = inverse if weight is None else weight * inverse
    return torch.native_batch_norm(x, scale, bias, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]


def avg_pool2d_backward(
    dy: Any, x: Any, kernel: Any, stride: Any, padding: Any, *settings: Any, grad_input: Any = None
) -> Any:
    """``aten.avg_pool2d_backward`` of CUDA, which forgets the padding of channels-last maps."""
    call = torch.ops.aten.avg_pool2d_backward.default
    if suggest_memory_format(x) == torch.channels_last:
        # ``avg_pool2d_backward_out_cuda_frame_nhwc`` takes a pixel's place in the map for that in the padded map.
        padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
        result = call(dy, padded, kernel, stride, (0, 0), *settings)[:, :, : x.shape[2], : x.shape[3]]
    else:
        result = call(dy, x, kernel, stride, padding, *settings)
    return result.contiguous() if grad_input is None else grad_input.copy_(result)


_KERNELS = {
    "avg_pool2d_backward": avg_pool2d_backward,
    "batch_norm_backward_elemt": batch_norm_backward_elemt,
    "batch_norm_elemt": batch_norm_elemt,
}


class SynchronisationError(AssertionError):
    """The host waits for the device where it may not."""


class RaceError(AssertionError):
    """Memory is touched while a stream may still be using it."""


@dataclass
class _Memory:
    """One storage: where it is, and its last write and reads, as (timeline, tick)."""

    alive: StorageWeakRef
    on_gpu: bool = False
    pinned: bool = False
    owner: int = 0
    write: tuple[int, int] | None = None
    reads: dict[int, int] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)


class Stream:
    """Stands in for ``torch.cuda.Stream``."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.number = len(gpu.streams) + 1  # 0 is the host
        self.clock: Clock = {self.number: 0}
        self.time_s = 0.0
        self.queue: deque[tuple[int, Callable[[], None]]] = deque()
        gpu.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        self.time_s = max(self.time_s, other.time_s)
        self._gpu.learn(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        self.time_s = max(self.time_s, event.time_s)
        self._gpu.learn(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._gpu.host_waits("Stream.synchronize")
        self._gpu.learn(self._gpu.host, self.clock)


class Event:
    """Stands in for ``torch.cuda.Event``."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self.clock, self._left, self.time_s = gpu, Clock(), 0, 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._gpu.current
        self.time_s = stream.time_s
        self.clock, self._left = dict(stream.clock), self._gpu.random.randint(0, _POLLS)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._gpu.current).wait_event(self)

    def query(self) -> bool:
        self._left -= 1
        if self._left >= 0 and not self._is_known():
            return False
        self._gpu.learn(self._gpu.host, self.clock)
        return True

    def synchronize(self) -> None:
        self._gpu.host_waits("Event.synchronize")
        self._gpu.learn(self._gpu.host, self.clock)

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds of the device's time between two events that have completed."""
        if not self._is_known() or not end._is_known():
            raise RuntimeError("elapsed_time: an event has not completed")
        return (end.time_s - self.time_s) * 1e3

    def _is_known(self) -> bool:
        return all(self._gpu.host.get(number, 0) >= tick for number, tick in self.clock.items() if number)


class FakeGpu:
    """See the module.

    Attributes:
        waits: how often the host has waited for the device.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.host: Clock = {0: 0}
        self.waits: list[str] = []
        self.lock = threading.RLock()
        self._default = Stream(self)
        self._local = threading.local()
        self._memory: dict[int, _Memory] = {}
        self._forbidden = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FakeGpu:
        for name, stand_in in {
            "Stream": lambda device=None, **given: Stream(self),
            "Event": lambda **given: Event(self),
            "current_stream": lambda device=None: self.current,
            "stream": self._with_stream,
            "set_stream": lambda stream: setattr(self._local, "stream", stream),
            "set_device": lambda device: None,
            "synchronize": lambda device=None: [stream.synchronize() for stream in self.streams],
        }.items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        record = mock.patch.object(
            torch.Tensor, "record_stream", lambda tensor, stream: self.memory(tensor).recorded.add(stream.number)
        )
        self._stack.enter_context(record)
        device = property(lambda storage: CUDA if self.memory(storage).on_gpu else torch.device("cpu"))
        self._stack.enter_context(mock.patch.object(torch.UntypedStorage, "device", device, create=True))
        resize = torch.UntypedStorage.resize_
        resized = mock.patch.object(torch.UntypedStorage, "resize_", lambda s, size: self._resized(resize, s, size))
        self._stack.enter_context(resized)
        run = threading.Thread.run
        self._stack.enter_context(
            mock.patch.object(threading.Thread, "run", lambda thread: self._in_thread(run, thread))
        )
        self._stack.enter_context(_Calls(self))
        self._stack.enter_context(_Operators(self))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _in_thread(self, run: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
        with _Calls(self), _Operators(self):
            run(thread)

    @property
    def current(self) -> Stream:
        """The current stream of this thread; that of a new thread is the default stream."""
        return getattr(self._local, "stream", self._default)

    @contextlib.contextmanager
    def no_synchronisation(self) -> Iterator[None]:
        """Context in which the host may not wait for the device."""
        self._forbidden = True
        try:
            yield
        finally:
            self._forbidden = False

    @contextlib.contextmanager
    def _with_stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    # -- memory

    def memory(self, tensor: torch.Tensor | torch.UntypedStorage) -> _Memory:
        """Return what is known of a tensor's memory."""
        storage = tensor if isinstance(tensor, torch.UntypedStorage) else tensor.untyped_storage()
        found = self._memory.get(storage._cdata)
        if found is None or found.alive.expired():
            found = self._memory[storage._cdata] = _Memory(StorageWeakRef(storage), owner=self.current.number)
        return found

    def on_gpu(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return self.memory(tensor).on_gpu

    def place(self, tensor: torch.Tensor, on_gpu: bool = True) -> torch.Tensor:
        """Say that a new tensor's memory is on the device."""
        self.memory(tensor).on_gpu = on_gpu
        return tensor

    def touch(self, tensor: torch.Tensor, timeline: int, writes: bool, what: str) -> None:
        """Check and note an access by a stream, or by the host (0)."""
        memory, clock = self.memory(tensor), self._clock(timeline)
        earlier = [memory.write] if memory.write is not None else []
        for other, tick in [*earlier, *(memory.reads.items() if writes else ())]:
            if other != timeline and clock.get(other, 0) < tick:
                raise RaceError(f"{what} on {_name(timeline)}, but {_name(other)} may still be using its memory")
        if writes:
            memory.write, memory.reads = (timeline, clock[timeline]), {}
        else:
            memory.reads[timeline] = clock[timeline]

    def check_freed(self) -> None:
        """Check that freed memory is not in use by a stream other than the one that it belongs to."""
        for key, memory in [(key, memory) for key, memory in self._memory.items() if memory.alive.expired()]:
            del self._memory[key]
            if memory.on_gpu:
                self._check_unused(memory)

    def _check_unused(self, memory: _Memory) -> None:
        uses = dict(memory.reads) | ({memory.write[0]: memory.write[1]} if memory.write is not None else {})
        for other, tick in uses.items():
            known = max(clock.get(other, 0) for clock in (self._clock(memory.owner), self.host))
            if other and other != memory.owner and known < tick and other not in memory.recorded:
                raise RaceError(f"memory was freed while {_name(other)} may still be using it: record_stream")

    def _resized(self, resize: Any, storage: torch.UntypedStorage, size: int) -> Any:
        """Free the memory of a storage, or allocate it: then work of the current stream may have used it before."""
        with self.lock:
            memory = self.memory(storage)
            if memory.on_gpu:
                self._check_unused(memory)
                self.tick(self.current.number)
                memory.owner, memory.reads = self.current.number, {}
                memory.write = (self.current.number, self.current.clock[self.current.number])
            return resize(storage, size)

    # -- time

    def _clock(self, timeline: int) -> Clock:
        return self.host if timeline == 0 else self.streams[timeline - 1].clock

    def tick(self, timeline: int) -> None:
        """Begin the next operation of a stream or of the host."""
        clock = self._clock(timeline)
        clock[timeline] += 1
        if timeline:  # what the host has seen when it starts the work has happened before it
            for other, tick in self.host.items():
                clock[other] = max(clock.get(other, 0), tick)

    def learn(self, clock: Clock, other: Clock) -> None:
        """Let a timeline wait for another; copies that it has waited for have run."""
        with self.lock:
            for number, tick in [*other.items()]:
                clock[number] = max(clock.get(number, 0), tick)
                if number:
                    self._run(self.streams[number - 1], tick)

    def later(self, copy: Callable[[], None]) -> None:
        """Run a copy on the current stream, at some later time."""
        self.current.queue.append((self.current.clock[self.current.number], copy))

    def run_some(self) -> None:
        """Run some copies, as drawn."""
        for stream in self.streams:
            if stream.queue and self.random.random() < _RUN_PROBABILITY:
                self._run(stream, stream.queue[0][0])

    def _run(self, stream: Stream, tick: int) -> None:
        while stream.queue and stream.queue[0][0] <= tick:
            with _disable_current_modes():
                stream.queue.popleft()[1]()

    def host_waits(self, what: str) -> None:
        """Count a wait of the host for the device.

        Raises:
            SynchronisationError: it may not.
        """
        if self._forbidden:
            raise SynchronisationError(f"{what} makes the host wait for the device")
        self.waits.append(what)


class _Calls(TorchFunctionMode):
    """Attributes, placement and conversion of tensors."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs = self._gpu, dict(kwargs or {})
        if func == torch.Tensor.is_cuda.__get__:
            return gpu.on_gpu(args[0])
        if func == torch.Tensor.device.__get__:
            return CUDA if gpu.on_gpu(args[0]) else func(*args)
        if func == torch.Tensor.is_pinned:
            return gpu.memory(args[0]).pinned
        if func == torch.Tensor.pin_memory:
            gpu.touch(args[0], 0, False, "pin_memory")
            result = args[0].clone()
            gpu.memory(result).pinned = True
            return result
        if func in _FROM_PYTHON:
            if gpu.on_gpu(args[0]):
                raise TypeError(f"{func.__name__} of a tensor on {CUDA}")
            gpu.touch(args[0], 0, False, func.__name__)
            return func(*args, **kwargs)
        if func in (torch.Tensor.cpu, torch.Tensor.cuda):
            return _moved(gpu, args[0], CUDA if func == torch.Tensor.cuda else torch.device("cpu"))
        if func == torch.Tensor.new_tensor:
            return self._created(torch.tensor, args[1:], {"dtype": args[0].dtype, "device": args[0].device, **kwargs})
        if func == torch.Tensor.to:
            return self._to(*args, **kwargs)
        return self._created(func, args, kwargs)

    def _created(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function, which may create a tensor on a device, or in pinned memory."""
        gpu, pinned = self._gpu, bool(kwargs.pop("pin_memory", False))
        device = kwargs.get("device")
        if device is None:
            result = func(*args, **kwargs)
        else:
            on_gpu = torch.device(device).type == "cuda"
            kwargs["device"] = "cpu" if on_gpu else device
            result = func(*args, **kwargs)
            if on_gpu and func == torch.tensor:
                gpu.host_waits("torch.tensor with values for a device")
            gpu.place(result, on_gpu)
        if pinned:
            gpu.memory(result).pinned = True
        return result

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], torch.Tensor):
            other, args = args[0], args[1:]
            device, dtype = (CUDA if self._gpu.on_gpu(other) else torch.device("cpu")), other.dtype
            non_blocking, order = (args[0] if args else kwargs.get("non_blocking", False)), None
        else:
            device, dtype, non_blocking, order = torch._C._nn._parse_to(*args, **kwargs)
        options = {} if order is None else {"memory_format": order}
        if device is None or (device.type == "cuda") == self._gpu.on_gpu(tensor):
            return tensor.detach().__class__.to(tensor, dtype=dtype or tensor.dtype, copy=copy, **options)
        moved = _moved(self._gpu, tensor, device, non_blocking, options)
        return moved if dtype is None or dtype == moved.dtype else moved.to(dtype)


def _moved(
    gpu: FakeGpu, tensor: torch.Tensor, device: torch.device, non_blocking: bool = False, options: Any = None
) -> torch.Tensor:
    """Return a copy on another device."""
    if (device.type == "cuda") == gpu.on_gpu(tensor):
        return tensor
    here = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    result = gpu.place(torch.empty_like(here, **(options or {})), device.type == "cuda")
    return result.copy_(tensor, non_blocking=non_blocking)


class _Operators(TorchDispatchMode):
    """Every operator: where its tensors are, who touches their memory, whether the host waits."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._gpu.lock:
            return self._dispatched(func, args, kwargs)

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        gpu, kwargs, name = self._gpu, kwargs or {}, func._schema.name.removeprefix("aten::")
        gpu.check_freed()
        gpu.run_some()
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name == "copy_" and gpu.on_gpu(args[0]) != gpu.on_gpu(args[1]):
            return self._copied(func, args[0], args[1], bool(kwargs.get("non_blocking", args[2:] and args[2])))
        there = [tensor for tensor in inputs if gpu.on_gpu(tensor)]
        strays = [tensor for tensor in inputs if tensor.dim() and not gpu.on_gpu(tensor)] if there else []
        if strays:
            raise RuntimeError(f"{name}: tensors on {CUDA} and on the host ({[tuple(t.shape) for t in strays]})")
        timeline = gpu.current.number if there else 0
        gpu.tick(timeline)
        written = {id(leaf) for leaf in self._written(func, args, kwargs)}
        if not func.is_view:
            for tensor in there or inputs:
                gpu.touch(tensor, timeline, id(tensor) in written, name)
        if there and (name in _READS or (name == "index" and _by_mask(args))):
            gpu.host_waits(name)
            gpu.learn(gpu.host, gpu.current.clock)
        if there:
            gpu.learn(gpu.current.clock, gpu.current.clock)  # earlier copies of this stream
        if there and name in _KERNELS:
            with _disable_current_modes():
                result = _KERNELS[name](*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and there:
                gpu.place(leaf)
                gpu.memory(leaf).write = gpu.memory(leaf).write or (timeline, gpu.current.clock[timeline])
        return result

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
        """Return the tensors that an operator changes."""
        found = []
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                found += tree_leaves(value)
        return found

    def _copied(self, func: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Copy between host and device on the current stream."""
        gpu = self._gpu
        gpu.tick(gpu.current.number)
        gpu.touch(source, gpu.current.number, False, "copy")
        gpu.touch(target, gpu.current.number, True, "copy")
        host = source if gpu.on_gpu(target) else target
        if not non_blocking or not gpu.memory(host).pinned:
            gpu.learn(gpu.current.clock, gpu.current.clock)  # earlier copies of this stream
            func(target, source)
            gpu.host_waits("a blocking copy" if not non_blocking else "a copy of memory that is not pinned")
            gpu.learn(gpu.host, gpu.current.clock)
            return target
        # Memory of the device may be freed before the copy runs, which ``check_freed`` sees; its values cannot change.
        from_, to = (source.detach().clone() if gpu.on_gpu(source) else source.detach()), target.detach()
        with torch.no_grad():
            if to.is_contiguous():
                to.view(-1).view(torch.uint8).fill_(_GARBAGE)
        gpu.later(lambda: func(to, from_))
        return target


def _by_mask(args: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1]))


def _name(timeline: int) -> str:
    return "the host" if timeline == 0 else f"stream {timeline}"
