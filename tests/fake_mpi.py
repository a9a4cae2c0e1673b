"""MPI for one rank of many, without a library: messages leave and arrive when drawn, at the addresses that were given.

    adapter = adapter_over(FakeMpi(gpu, peers, seed))
    comm = adapter.MpiCommunicator(adapter.MPI.COMM_WORLD)

``peers`` says what the others send. A request reads or writes its memory when it completes, as the real ones do: memory
that the host or a stream of the device has not finished with, or changes too early, gives wrong bytes or an error.
"""

from __future__ import annotations

import ctypes
import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.fake_gpu import FakeGpu

_ADAPTER = Path(__file__).parents[1] / "hyfi_core" / "comm" / "mpi.py"
Peers = Callable[[int, int], bytes]
"""(rank, number of bytes) -> what it sends."""


class _Memory:
    """A piece of memory by its address, as ``MPI.memory``."""

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size

    def __len__(self) -> int:
        return self.size

    @classmethod
    def fromaddress(cls, address: int, size: int) -> _Memory:
        return cls(address, size)


class FakeMpi:
    """Stands in for ``mpi4py.MPI``.

    Args:
        peers: what other ranks send.
        seed: of the order in which requests complete.
        gpu: the device, to check that direct access to its memory is allowed.

    Attributes:
        sent: (peer, bytes), in the order in which sends complete.
        direct: how many messages were in the device's memory.
    """

    FLOAT, DOUBLE, INT64_T, INT32_T, UINT8_T, BYTE = "FLOAT", "DOUBLE", "INT64_T", "INT32_T", "UINT8_T", "BYTE"
    SUM, MAX, MIN, IN_PLACE, UNDEFINED, ANY_SOURCE, THREAD_SERIALIZED = 0, 1, 2, "IN_PLACE", -1, -2, 2
    memory = _Memory
    __file__ = ""

    def __init__(self, peers: Peers, seed: int = 0, gpu: FakeGpu | None = None) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.direct = 0
        self.on_device: dict[int, torch.Tensor] = {}
        self._peers, self._gpu, self._random = peers, gpu, random.Random(seed)
        self._open: dict[int, Callable[[], None]] = {}
        self._count = 0
        self.Request = SimpleNamespace(Testall=self._test_all)
        self.COMM_WORLD = SimpleNamespace(
            Get_rank=lambda: 0, Get_size=lambda: 2, Isend=self._send, Irecv=self._receive, Iallreduce=self._reduce
        )

    def Query_thread(self) -> int:  # noqa: N802 (a name of MPI)
        return self.THREAD_SERIALIZED

    def Get_library_version(self) -> str:  # noqa: N802
        return "a stand-in"

    def device_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let messages in a tensor of the device be checked as accesses of the host."""
        self.on_device[tensor.data_ptr()] = tensor
        return tensor

    def _touch(self, piece: _Memory, writes: bool) -> None:
        if self._gpu is not None and piece.address in self.on_device:
            self.direct += 1
            self._gpu.touch(self.on_device[piece.address], 0, writes, "a message")

    def _send(self, spec: list[Any], peer: int, tag: int) -> int:
        piece = spec[0]
        self._touch(piece, False)
        return self._started(lambda: self.sent.append((peer, ctypes.string_at(piece.address, piece.size))))

    def _receive(self, spec: list[Any], peer: int, tag: int) -> int:
        piece = spec[0]
        self._touch(piece, True)
        return self._started(lambda: ctypes.memmove(piece.address, self._peers(peer, piece.size), piece.size))

    def _reduce(self, place: Any, spec: list[Any], op: int) -> int:
        """Add what the other rank gives: float32."""
        piece, _, datatype = spec
        assert datatype == self.FLOAT and op == self.SUM

        def run() -> None:
            ours = torch.frombuffer(bytearray(ctypes.string_at(piece.address, piece.size)), dtype=torch.float32)
            theirs = torch.frombuffer(bytearray(self._peers(1, piece.size)), dtype=torch.float32)
            total = (ours + theirs).numpy().tobytes()
            ctypes.memmove(piece.address, total, piece.size)

        return self._started(run)

    def _started(self, run: Callable[[], Any]) -> int:
        self._count += 1
        self._open[self._count] = run
        return self._count

    def _test_all(self, requests: list[int]) -> bool:
        for number in [*self._open]:
            if self._random.random() < 0.3:
                self._open.pop(number)()
        return not any(number in self._open for number in requests)


def adapter_over(fake: FakeMpi) -> ModuleType:
    """Return the MPI adapter, loaded again over a stand-in."""
    spec = importlib.util.spec_from_file_location("mpi_adapter_over_a_stand_in", _ADAPTER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"mpi4py": SimpleNamespace(MPI=fake, rc=SimpleNamespace()), spec.name: module}):
        spec.loader.exec_module(module)
    return module
