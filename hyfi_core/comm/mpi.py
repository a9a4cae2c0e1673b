"""MPI through mpi4py: for CPU ranks, and for GPU ranks through pinned host memory or, if MPI can, directly.

Every operation is non-blocking and is waited for with a back-off (spin, yield, sleep), because MPICH's blocking calls
use a full core while they wait, which slows down other ranks.

Messages are sent as bytes directly from the tensors' memory; a tensor must be contiguous, and the pending object keeps
it alive until its request has completed. Long messages are sent in slices with the same tag. Both ends cut them into
the same slices, whether in host or GPU memory, and counts of traffic count them as one message:

    device ── copy 0 ── copy 1 ── copy 2        a message of a GPU that goes through the host: slice k is sent while
    MPI               └─ send 0 ─ send 1 ─ …    slice k + 1 is copied, and on arrival slice k is copied to the device
                                                while slice k + 1 arrives
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import mpi4py
import torch

from hyfi_core.comm.activity import named_ranks
from hyfi_core.comm.base import Message, ReduceOp
from hyfi_core.comm.gpu_support import GpuSupport, gpu_support
from hyfi_core.comm.progress import OWN_CORE, SHARED_CORE, backed_off, set_patience
from hyfi_core.comm.supervision.rendezvous import Expected, joined
from hyfi_core.comm.wire import HostSlice, check_dense, decoded, encoded, from_wire, host_slices, to_wire

# `world` initialises MPI: mpi4py would keep the interpreter's lock until all ranks have come.
mpi4py.rc.initialize = False
mpi4py.rc.finalize = True
from mpi4py import MPI as MPI  # noqa: E402

_MOST_BYTES = 1 << 30  # counts of MPI-3 are 32-bit
_SLICE_BYTES = 16 << 20
"""Size of a slice of a message: small against long messages, large against what a slice costs (about 1 µs)."""

_DATATYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.uint8: MPI.UINT8_T,
}
_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


@functools.cache
def own_gpu_support() -> GpuSupport:
    """Return the GPU support of this process's MPI; its query is found through mpi4py: MPI's symbols are not global."""
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return gpu_support(MPI.Get_library_version(), query, os.environ)


def _pieces(tensor: torch.Tensor, most_bytes: int | None = None) -> list[Any]:
    """Return the tensor's bytes for MPI, in pieces of at most ``most_bytes``; one piece if it is empty.

    Raises:
        ValueError: the tensor is not dense.
    """
    check_dense(tensor)
    limit, total, start = most_bytes or _MOST_BYTES, tensor.nbytes, tensor.data_ptr()
    starts = range(0, max(1, total), limit)
    return [MPI.memory.fromaddress(start + first, min(limit, total - first)) for first in starts]


def _is_staged(tensor: torch.Tensor) -> bool:
    """Whether a message goes through pinned memory, because MPI cannot be given the tensor's own memory."""
    return tensor.device.type != "cpu" and not (tensor.device.type == "cuda" and own_gpu_support().direct)


def _in_place(tensor: torch.Tensor) -> list[Any]:
    """Return the slices of a message whose memory MPI can be given."""
    if tensor.device.type != "cpu":
        # MPI knows no streams: kernels may still write the message, or use the memory into which it is received.
        torch.cuda.current_stream(tensor.device).synchronize()
    return _pieces(tensor, min(_MOST_BYTES, _SLICE_BYTES))


def _slices(tensor: torch.Tensor) -> Sequence[Any]:
    """Return the slices of a message: memory for MPI, or a ``HostSlice`` where they go through pinned memory."""
    return host_slices(tensor, min(_MOST_BYTES, _SLICE_BYTES)) if _is_staged(tensor) else _in_place(tensor)


def _memory(part: Any) -> Any:
    """Return the memory of a slice for MPI."""
    return _pieces(part.buffer)[0] if isinstance(part, HostSlice) else part


def _await_copy(part: HostSlice, requests: list[Any], describe: Callable[[], str]) -> None:
    """Return when a slice is on the host; until then, let MPI send earlier slices."""

    def ready() -> bool:
        if part.is_copied():
            return True
        MPI.Request.Testall(requests)
        return False

    backed_off(ready, describe)


class _Requests:
    """Pending requests, and the tensors that must outlive them.

    Args:
        requests: MPI requests.
        describe: describes the wait.
        keep: the memory that MPI reads and writes.
        finish: called once, when all have completed.
        landing: (request, slice) of slices that are copied to a device once they are received.
    """

    @property
    def needs_polls(self) -> bool:
        # From this level on, a helper thread may call MPI if no other thread does: the body of ``polled`` does not.
        return bool(MPI.Query_thread() >= MPI.THREAD_SERIALIZED)

    def __init__(
        self,
        requests: list[Any],
        describe: Callable[[], str],
        keep: Sequence[Any] = (),
        finish: Callable[[], None] | None = None,
        landing: Iterable[tuple[Any, HostSlice]] = (),
    ) -> None:
        # (request, slice of a device's message that it receives on the host), not yet copied to the device.
        self._landing = deque(landing)
        self._stream = torch.cuda.current_stream() if any(part.pinned for _, part in self._landing) else None
        self._requests = requests
        self._what = describe
        # None once all requests have completed: then the memory is released, too.
        self._keep: Sequence[Any] | None = keep
        self._finish = finish

    def test(self) -> bool:
        # One by one, so that a slice is copied to the device while the next ones still arrive.
        while self._landing and MPI.Request.Testall([self._landing[0][0]]):
            # The stream on which the exchange began: a helper thread that polls has another current stream.
            with torch.cuda.stream(self._stream):
                self._landing.popleft()[1].copy_to_device()
        if self._keep is not None and not self._landing and MPI.Request.Testall(self._requests):
            if self._finish is not None:
                self._finish()
            self._keep = None
        return self._keep is None

    def wait(self) -> None:
        backed_off(self.test, self._what, self._nbytes)
        if self._stream is not None:
            # Slices were copied on the stream of the exchange; what comes next here may run on another.
            torch.cuda.current_stream().wait_stream(self._stream)

    def _nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._keep or ())


class MpiCommunicator:
    """A group of MPI ranks."""

    in_order = False

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()

    @property
    def rank(self) -> int:
        """This rank, counted in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self._size

    @property
    def largest_tag(self) -> int:
        """The largest tag of a message; MPI guarantees 32,767."""
        return _largest_tag() - 1  # the last one is that of ``gather_objects``

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Requests:
        """Start sends and receives, receives first."""
        requests: list[Any] = []
        landing: list[tuple[Any, HostSlice]] = []
        for message in receives:
            for part in _slices(message.tensor):
                # Posted before anything is sent: MPI can then write a message into its place instead of storing it
                # first.
                requests.append(self._comm.Irecv([_memory(part), MPI.BYTE], message.peer, message.tag))
                if isinstance(part, HostSlice):
                    landing.append((requests[-1], part))
        leaving = [(message, part) for message in sends for part in _slices(message.tensor)]
        copied = [part for _, part in leaving if isinstance(part, HostSlice)]
        # All copies are started before the first is waited for: they run while earlier slices are sent.
        for part in copied:
            part.copy_to_host()
        peers = [m.peer for m in (*receives, *sends)]
        describe = lambda: f"an exchange with {self._named(peers)}"  # noqa: E731
        for message, part in leaving:
            if isinstance(part, HostSlice):
                _await_copy(part, requests, describe)
            requests.append(self._comm.Isend([_memory(part), MPI.BYTE], message.peer, message.tag))
        # MPI reads and writes this memory until the requests have completed, even if the caller drops the tensors.
        direct = [message.tensor for message in (*receives, *sends) if not _is_staged(message.tensor)]
        buffers = [part.buffer for part in copied] + [part.buffer for _, part in landing]
        return _Requests(requests, describe, direct + buffers, landing=landing)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place; 16-bit floats are sent and added as float32 (see ``comm.wire``)."""
        self.start_all_reduce(tensor, op).wait()

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> _Requests:
        """Start reducing in place; 16-bit floats are sent and added as float32 (see ``comm.wire``)."""
        if self._size == 1:
            return _Requests([], describe=str)  # nothing to wait for, so that no text is ever shown
        wide = to_wire(tensor.to("cpu"), op)
        datatype, size = _DATATYPES[wide.dtype], wide.element_size()
        # No piece ends inside a number: ``_MOST_BYTES`` is a multiple of every dtype's size.
        specs = [[piece, len(piece) // size, datatype] for piece in _pieces(wide)]
        requests = [self._comm.Iallreduce(MPI.IN_PLACE, spec, _OPS[op]) for spec in specs]
        return _Requests(requests, self._describer("all-reduce"), [wide], finish=lambda: from_wire(wide, tensor, op))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Overwrite ``tensor`` with the root's."""
        if self._size == 1:
            return
        dense = tensor.detach().to("cpu").contiguous()
        requests = [self._comm.Ibcast([piece, MPI.BYTE], root) for piece in _pieces(dense)]
        _Requests(requests, self._describer("broadcast"), [dense]).wait()
        # A tensor that is on a device or not contiguous was copied.
        if dense.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(dense)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's value."""
        data = encoded(value) if self._rank == root else torch.empty(0, dtype=torch.uint8)
        # The length first: all ranks of a broadcast must pass the same count.
        size = torch.tensor([data.numel()])
        self.broadcast(size, root)
        if self._rank != root:
            data = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(data, root)
        return decoded(data)

    def gather_objects(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return all values on the root."""
        data = encoded(value)
        sizes = torch.zeros(self._size, dtype=torch.int64)
        # Each rank sets its own entry, and the sum gives all sizes to all ranks in one call.
        sizes[self._rank] = data.numel()
        self.all_reduce(sizes)
        if self._rank != root:
            self.exchange([Message(root, data, _largest_tag())], []).wait()
            return None
        buffers = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        buffers[root].copy_(data)
        peers = [peer for peer in range(self._size) if peer != root]
        self.exchange([], [Message(peer, buffers[peer], _largest_tag()) for peer in peers]).wait()
        return [decoded(buffer) for buffer in buffers]

    def send_object(self, value: Any, peer: int, tag: int) -> _Requests:
        """Start sending a small value, which is received as one piece."""
        data = encoded(value)
        requests = [self._comm.Isend([piece, MPI.BYTE], peer, tag) for piece in _pieces(data)]
        return _Requests(requests, lambda: f"a value for {self._named([peer])}", [data])

    def poll_object(self, tag: int, peer: int | None = None) -> tuple[int, Any] | None:
        """Return (sender, value) of one received value with a tag, or None; ``peer``: only of this sender."""
        status = MPI.Status()
        # A matched probe: exactly the message that it found is received, even if another thread receives, too.
        probed = self._comm.Improbe(MPI.ANY_SOURCE if peer is None else peer, tag, status)
        if probed is None:
            return None
        data = torch.empty(status.Get_count(MPI.BYTE), dtype=torch.uint8)
        probed.Recv([_pieces(data)[0], MPI.BYTE])
        return status.Get_source(), decoded(data)

    def barrier(self) -> None:
        """Return when every rank has entered the call."""
        _Requests([self._comm.Ibarrier()], self._describer("barrier")).wait()

    def split(self, color: int | None, key: int = 0) -> MpiCommunicator | None:
        """Return the group of all ranks that gave the same color, ordered by (key, rank)."""
        self.barrier()  # with back-off, and visible in the activity, unlike MPI's own wait in Split
        comm = self._comm.Split(MPI.UNDEFINED if color is None else color, key)
        return None if color is None else MpiCommunicator(comm)

    def subgroup(self, members: Sequence[int]) -> MpiCommunicator | None:
        """Return the group of ``members``; only they exchange messages for it."""
        self.barrier()  # as in ``split``
        if not members:
            return None
        # Collective over the members only, unlike ``Create``.
        return MpiCommunicator(self._comm.Create_group(self._comm.Get_group().Incl(list(members))))

    def _describer(self, operation: str) -> Callable[[], str]:
        """Return a function that describes an operation of all ranks, for messages about waits."""
        return lambda: f"{operation} of {self._named(range(self._size))}"

    def _named(self, ranks: Iterable[int]) -> str:
        """Return the names of ranks of this group, as numbered in the job."""
        world = MPI.COMM_WORLD.Get_group()
        return named_ranks(sorted(set(self._comm.Get_group().Translate_ranks(list(ranks), world))))

    def abort(self, code: int) -> NoReturn:
        """End every rank of the job."""
        # Abort ends the process without Python's own shutdown, and unflushed lines would be lost.
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(code)
        os._exit(code)


@functools.cache
def _largest_tag() -> int:
    return MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 2**15 - 1  # which MPI guarantees


def world(expected: Expected | None = None, interrupted: Callable[[], bool] = lambda: False) -> MpiCommunicator:
    """Return all ranks of the job, on a duplicate of MPI's world, so that users' messages cannot interfere.

    Args:
        expected: what the environment says about the other ranks, for messages.
        interrupted: whether a request to stop has been received; it ends the wait for other ranks.

    Raises:
        RendezvousError: they have not come in time.
        KeyboardInterrupt: a request to stop was received.
    """
    # ``joined`` starts a new thread, whose stack is still all zeros. MPICH sends the other ranks 4 KB of that stack,
    # although only an address in it matters. With other contents the lines are longer, Slurm's PMI-2 cuts them off, and
    # ranks wait for ever.
    return joined(_world, expected or Expected("mpi", os.environ), interrupted)


def _initialise() -> None:
    """Initialise MPI without holding the interpreter's lock, unless it is initialised; mpi4py finalises it."""
    if MPI.Is_initialized():
        return
    # By ctypes, which gives the lock up during a call: the main thread can then say which ranks it waits for, and can
    # be interrupted. mpi4py's extension module is linked to the MPI library, so the function is found through it.
    provided = ctypes.c_int()
    code = ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
    if code != MPI.SUCCESS:
        raise RuntimeError(f"MPI_Init_thread returned {code}")
    for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py raises errors that MPI returns; its own start sets the same


def _world() -> MpiCommunicator:
    """Return the communicator of all ranks, after starting MPI."""
    _initialise()
    # Tags of the duplicate are ours alone: a library that sends on the world cannot be taken for a peer.
    duplicate = MPI.COMM_WORLD.Dup()
    set_patience(SHARED_CORE if _shares_cores() else OWN_CORE)
    if MPI.get_vendor()[0] == "MPICH":
        duplicate.Barrier()  # every rank of the node has mapped it
        _remove_names_of_shared_memory()
    return MpiCommunicator(duplicate)


def _shares_cores() -> bool:
    """Return whether this node has more ranks than cores that these ranks may use (collective)."""
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    # The union over ranks: a launcher may bind each rank to other cores, or none to any.
    together = set().union(*node.allgather(set(usable)))
    ranks = node.Get_size()
    node.Free()
    return len(together) < ranks


def _remove_names_of_shared_memory() -> None:
    """Remove the name of the shared memory by which MPICH's ranks of this node exchange messages; they keep the memory.

    MPICH removes it only when ranks end normally: killed or aborted ranks would leave megabytes in ``/dev/shm``, which
    are in the way of the next ranks of the same Slurm job.
    """
    with contextlib.suppress(OSError):
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        for name in set(re.findall(r"/dev/shm/mpich_shm_\w+$", mapped, re.MULTILINE)):
            with contextlib.suppress(FileNotFoundError):  # another rank of the node was first
                Path(name).unlink()


def flavour() -> str:
    """Return the MPI library's name and version, first line."""
    return str(MPI.Get_library_version()).splitlines()[0].strip()
