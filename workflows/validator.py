"""Validation while training goes on: snapshots of the weights go to validator ranks, numbers come back.

::

    trainer 0                                   validator 0                    validators 1 …
      work {step, bytes}          ──────────►     posts a receive
      snapshot (flat bytes)       ──────────►     order {validate}, bytes ───►   the same engine
      … trains on …                               judges slide by slide, all of them together
                                  ◄──────────     result {step, metrics}
      work {end, stopped}         ──────────►     order {end}            ───►
                                  ◄──────────     bye

At most ``QUEUE`` snapshots are on their way; then trainer 0 waits, so none is skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from data.backoff import Backoff
from hyfi_core.comm.base import Communicator, Message, Pending
from workflows.evaluation import Interrupted

WORK_TAG, SNAPSHOT_TAG, RESULT_TAG, ORDER_TAG = 110, 111, 112, 113
QUEUE = 2

Metrics = dict[str, float | None]
Evaluate = Callable[[Mapping[str, torch.Tensor], Callable[[], bool]], Metrics | None]
"""(weights, interrupted) → metrics on the first rank of the group, None on the others; may raise Interrupted."""


def flatten(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return all tensors of a ``state_dict``, in its order, as one newly allocated row of bytes."""
    parts = [value.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for value in state.values()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def unflatten(flat: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of ``flatten``, copied, with names, shapes and types of ``like``."""
    size = sum(value.numel() * value.element_size() for value in like.values())
    if size != flat.numel():
        raise ValueError(f"a snapshot of {flat.numel()} bytes does not fit a model of {size} bytes")
    result, start = {}, 0
    for name, value in like.items():
        end = start + value.numel() * value.element_size()
        result[name] = flat[start:end].clone().view(value.dtype).reshape(value.shape)
        start = end
    return result


class ValidationClient:
    """Trainer 0's side: hands snapshots over, collects results in the order of the steps.

    Args:
        world: all ranks.
        leader: world rank of validator 0.
    """

    def __init__(self, world: Communicator, leader: int) -> None:
        self._world, self._leader = world, leader
        self._sending: list[Pending] = []
        self._results: list[tuple[int, Metrics]] = []
        self._open: list[int] = []
        self._bye = False

    @property
    def open_steps(self) -> tuple[int, ...]:
        """Steps whose results have not come yet."""
        return tuple(self._open)

    def submit(self, step: int, state: Mapping[str, torch.Tensor], impatient: Callable[[], bool]) -> bool:
        """Hand the weights of ``step`` over (copied before this returns); wait while the queue is full.

        Returns:
            False where ``impatient`` said so while waiting: these weights were not handed over.
        """
        if not self._wait(lambda: len(self._open) < QUEUE, impatient):
            return False
        flat = flatten(state)
        work = {"kind": "validate", "step": step, "bytes": flat.numel()}
        self._sending.append(self._world.send_object(work, self._leader, WORK_TAG))
        self._sending.append(self._world.exchange([Message(self._leader, flat, SNAPSHOT_TAG)], []))
        self._open.append(step)
        return True

    def collect(self) -> list[tuple[int, Metrics]]:
        """Return the results that have come since the last call; never blocks."""
        self._progress()
        results, self._results = self._results, []
        return results

    def drain(self, impatient: Callable[[], bool]) -> bool:
        """Wait until all results are in; False where ``impatient`` said so before."""
        return self._wait(lambda: not self._open, impatient)

    def close(self, stopped: bool) -> None:
        """End the service; with ``stopped`` what is open is given up. Returns when the validators have said goodbye."""
        word = {"kind": "end", "stopped": stopped}
        self._sending.append(self._world.send_object(word, self._leader, WORK_TAG))
        self._wait(lambda: self._bye and not self._sending, lambda: False)

    def _wait(self, ready: Callable[[], bool], impatient: Callable[[], bool]) -> bool:
        backoff = Backoff()
        self._progress()
        while not ready():
            if impatient():
                return False
            backoff.pause()
            self._progress()
        return True

    def _progress(self) -> None:
        self._sending = [pending for pending in self._sending if not pending.test()]
        while (found := self._world.poll_object(RESULT_TAG, self._leader)) is not None:
            word = found[1]
            if word["kind"] == "bye":
                self._bye = True
            else:
                self._results.append((word["step"], word["metrics"]))
                self._open.remove(word["step"])


@dataclass
class _Work:
    """One word from trainer 0; for a snapshot also where it arrives."""

    kind: str
    step: int = 0
    stopped: bool = False
    flat: torch.Tensor | None = None
    arriving: Pending | None = None


class ValidationService:
    """The validators' side; runs until trainer 0 ends it.

    Args:
        world: all ranks.
        group: the validators; its rank 0 talks to trainer 0.
        like: the model's ``state_dict``: names, shapes and types of a snapshot.
        evaluate: judges weights, on all validators together.
        watch: called between messages, for signals; may raise.
    """

    def __init__(
        self,
        world: Communicator,
        group: Communicator,
        like: Mapping[str, torch.Tensor],
        evaluate: Evaluate,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self._world, self._group, self._like = world, group, dict(like)
        self._evaluate, self._watch = evaluate, watch
        self._queue: deque[_Work] = deque()
        self._sending: list[Pending] = []
        self._given_up = False

    def serve(self) -> bool:
        """Serve; return whether the run was stopped before its time."""
        return self._lead() if self._group.rank == 0 else self._follow()

    def _lead(self) -> bool:
        backoff = Backoff()
        while True:
            self._listen()
            if not self._queue:
                backoff.pause()
                continue
            backoff.reset()
            work = self._queue.popleft()
            if work.kind == "end":
                return self._leave(work.stopped)
            self._arrive(work)
            if not self._given_up:
                self._order({"kind": "validate", "bytes": len(self._flat(work))})
                self._report(work, self._validate(self._flat(work)))

    def _follow(self) -> bool:
        backoff = Backoff()
        while True:
            self._watch()
            found = self._group.poll_object(ORDER_TAG, 0)
            if found is None:
                backoff.pause()
                continue
            backoff.reset()
            word = found[1]
            if word["kind"] == "end":
                return bool(word["stopped"])
            self._validate(torch.empty(word["bytes"], dtype=torch.uint8))

    def _validate(self, flat: torch.Tensor) -> Metrics | None:
        """Judge weights that validator 0 has, on all validators; None where it was given up."""
        self._group.broadcast(flat)
        try:
            return self._evaluate(unflatten(flat, self._like), self._interrupted)
        except Interrupted:
            return None

    def _interrupted(self) -> bool:
        """Return whether trainer 0 has given this up; the same on all validators."""
        if self._group.rank == 0:
            self._listen()
        else:
            self._watch()
        vote = torch.tensor([int(self._given_up)])
        self._group.all_reduce(vote, "max")
        return bool(vote.item())

    def _listen(self) -> None:
        """Take what trainer 0 has said; receives of snapshots are posted at once."""
        self._watch()
        self._sending = [pending for pending in self._sending if not pending.test()]
        while (found := self._world.poll_object(WORK_TAG, 0)) is not None:
            word = found[1]
            if word["kind"] == "end":
                self._given_up |= bool(word["stopped"])
                self._queue.append(_Work("end", stopped=bool(word["stopped"])))
                continue
            flat = torch.empty(word["bytes"], dtype=torch.uint8)
            arriving = self._world.exchange([], [Message(0, flat, SNAPSHOT_TAG)])
            self._queue.append(_Work("validate", word["step"], flat=flat, arriving=arriving))

    def _arrive(self, work: _Work) -> None:
        backoff = Backoff()
        while work.arriving is not None and not work.arriving.test():
            self._watch()
            backoff.pause()

    def _report(self, work: _Work, metrics: Metrics | None) -> None:
        if metrics is not None:
            word = {"kind": "result", "step": work.step, "metrics": metrics}
            self._sending.append(self._world.send_object(word, 0, RESULT_TAG))

    def _leave(self, stopped: bool) -> bool:
        self._order({"kind": "end", "stopped": stopped})
        self._sending.append(self._world.send_object({"kind": "bye"}, 0, RESULT_TAG))
        for pending in self._sending:
            pending.wait()
        return stopped

    def _order(self, word: Mapping[str, Any]) -> None:
        for rank in range(1, self._group.size):
            self._sending.append(self._group.send_object(dict(word), rank, ORDER_TAG))

    @staticmethod
    def _flat(work: _Work) -> torch.Tensor:
        assert work.flat is not None
        return work.flat
