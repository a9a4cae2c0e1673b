"""A group of a single rank."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from hyfi_core.comm.base import LARGEST_TAG, Completed, Message, ReduceOp


class AloneCommunicator:
    """The only rank."""

    rank = 0
    size = 1
    in_order = False
    largest_tag = LARGEST_TAG

    def __init__(self) -> None:
        self._objects: dict[int, deque[Any]] = {}

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Completed:
        """Copy what this rank sends to itself."""
        for send, receive in zip(sends, receives, strict=True):
            receive.tensor.copy_(send.tensor)
        return Completed()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Do nothing."""

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Completed:
        """Do nothing."""
        return Completed()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Do nothing."""

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the value."""
        return value

    def gather_objects(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the only value."""
        return [value]

    def send_object(self, value: Any, peer: int, tag: int) -> Completed:
        """Store a value for ``poll_object``."""
        self._objects.setdefault(tag, deque()).append(value)
        return Completed()

    def poll_object(self, tag: int, peer: int | None = None) -> tuple[int, Any] | None:
        """Return (0, value) of a stored value, or None."""
        values = self._objects.get(tag)
        return (0, values.popleft()) if values else None

    def barrier(self) -> None:
        """Return at once."""

    def split(self, color: int | None, key: int = 0) -> AloneCommunicator | None:
        """Return this group, or None."""
        return None if color is None else AloneCommunicator()

    def subgroup(self, members: Sequence[int]) -> AloneCommunicator | None:
        """Return this group, or None without members."""
        return AloneCommunicator() if members else None

    def abort(self, code: int) -> NoReturn:
        """End the process."""
        os._exit(code)
