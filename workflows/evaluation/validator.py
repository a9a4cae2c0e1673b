"""Validation while training continues: the validator ranks, which supervise child processes that compute.

::

    trainer 0                       validator 0 ── its child            validator 1 … ── their children
      work {step, bytes}   ──────►    posts a receive
      snapshot             ──────►      in memory that the child shares
      … trains on …                   {validate} ──► sends the weights on to the other children;
                                                     all evaluate, slide by slide, over gloo
                           ◄──────    result     ◄──
                                      a child died: reported; all children are started again,
                                      the snapshot is still there; at the third time:
                           ◄──────    gave up                          {kill}  ──────►
      work {end}           ──────►                                     {end}   ──────►
                           ◄──────    bye

A child that *dies* (killed, out of memory, a crash in a library) is replaced; one that *raises* would do so again, and
its error is the run's. Children know nothing of MPI; how they end never ends the job by itself.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.loading.backoff import Backoff
from hyfi_core.comm.base import Communicator, Message, Pending
from hyfi_core.errors import RequestError
from workflows.console import warn
from workflows.evaluation.shared_buffers import SharedBuffer, SharedBuffers
from workflows.evaluation.validation_client import QUEUE, RESULT_TAG, SNAPSHOT_TAG, WORK_TAG
from workflows.launch.child_process import LOST_PEER, ChildProcess, Word

ORDER_TAG, DEATH_TAG = 113, 114
MOST_DEATHS = 3
"""Number of crashes without a finished validation after which the validators give up."""

Start = Callable[[Mapping[str, Any], Sequence[int]], ChildProcess]
"""(seat, descriptors) → a child that was just started; seat: rank, size, and where child 0 is found."""


class ValidationChildError(RuntimeError):
    """A child has raised; the message is its traceback."""


@dataclass
class _QueuedSnapshot:
    """A snapshot, arriving or there."""

    step: int
    place: SharedBuffer
    arriving: Pending


class ValidationService:
    """One validator rank: starts a child, watches over it, replaces it.

    Args:
        world: all ranks.
        group: the validators; its rank 0 talks to trainer 0.
        start: starts this rank's child.
        watch: called between messages, for signals; may raise.
    """

    def __init__(
        self, world: Communicator, group: Communicator, start: Start, watch: Callable[[], None] = lambda: None
    ) -> None:
        self._world, self._group, self._start, self._watch = world, group, start, watch
        self._leads = group.rank == 0
        self._buffers = SharedBuffers(QUEUE if self._leads else 0)
        self._child: ChildProcess | None = None
        self._round = 0
        self._host = ""
        self._sending: list[Pending] = []
        self._queue: deque[_QueuedSnapshot] = deque()
        self._end: Word | None = None
        self._ready = self._busy = self._gave_up = False
        self._deaths = 0

    def begin(self) -> None:
        """Start the children and return when they are ready (collective over the group).

        Raises:
            RequestError: the validators do not support the run's configuration.
            ValidationChildError: one of them raised.
        """
        hosts = self._group.broadcast_object(self._group.gather_objects(socket.gethostname()))
        self._host = hosts[0] if len(set(hosts)) > 1 else "localhost"
        if not self._leads:
            self._run_follower()
            return
        self._replace_child(None)
        self._run_leader(lambda: self._ready or self._gave_up or self._end is not None)
        self._send_to_followers({"kind": "begun"})

    def serve(self) -> bool:
        """Serve until trainer 0 ends it; return whether the run was stopped before its time."""
        try:
            if not self._leads:
                return self._run_follower()
            self._run_leader(lambda: self._end is not None and not self._queue)
            assert self._end is not None
            return self._finish(bool(self._end["stopped"]))
        finally:
            self._kill()
            self._buffers.close()

    # -- validator 0

    def _run_leader(self, done: Callable[[], bool]) -> None:
        backoff = Backoff()
        while not done():
            if self._receive() | self._advance_child():
                backoff.reset()
            else:
                backoff.pause()

    def _receive(self) -> bool:
        """Take the messages of trainer 0 and the other validators; whether there were any."""
        self._watch()
        self._sending = [pending for pending in self._sending if not pending.test()]
        heard = False
        while (found := self._world.poll_object(WORK_TAG, 0)) is not None:
            heard, word = True, found[1]
            if word["kind"] == "end":
                self._end = word
            else:
                place = self._buffers.take(word["bytes"])
                arriving = self._world.exchange([], [Message(0, place.flat, SNAPSHOT_TAG)])
                self._queue.append(_QueuedSnapshot(word["step"], place, arriving))
        while (found := self._group.poll_object(DEATH_TAG)) is not None:
            self._on_death_notice(found[1])
        return heard

    def _advance_child(self) -> bool:
        """Give the child its next work; return whether anything happened."""
        if self._gave_up or (self._end is not None and (self._end["stopped"] or self._end["needless"])):
            self._kill()
            return self._discard_snapshots()
        assert self._child is not None
        word = self._child.hear()
        if word is not None:
            self._on_leader_child(word)
        if self._ready and not self._busy and self._queue and self._queue[0].arriving.test():
            work = self._queue[0]
            self._busy = True
            self._child.say(
                {
                    "kind": "validate",
                    "step": work.step,
                    "bytes": work.place.flat.numel(),
                    "descriptor": work.place.descriptor,
                }
            )
            return True
        return word is not None

    def _on_leader_child(self, word: Word) -> None:
        if word["kind"] == "port":
            self._send_to_followers({"kind": "start", "port": word["port"], "round": self._round})
        elif word["kind"] == "ready":
            self._ready = True
        elif word["kind"] == "result":
            work = self._queue.popleft()
            self._buffers.give(work.place)
            self._busy, self._deaths = False, 0
            self._send_to_trainer({"kind": "result", "step": work.step, "metrics": word["metrics"]})
        elif word["kind"] == "died":
            self._on_death(0, word["how"])
        else:
            self._fail(word)

    def _on_death_notice(self, notice: Word) -> None:
        """Handle the crash of another validator's child; its cause is reported even if its effects were seen first."""
        if notice["round"] == self._round and not self._gave_up:
            self._on_death(notice["rank"], notice["how"])
        elif notice["how"] != LOST_PEER:
            warn(f"hyfi: the validation process of validator {notice['rank']} ended with {notice['how']}")

    def _on_death(self, rank: int, how: str) -> None:
        """Report the crash of a validator's child, and restart all children, or give up."""
        self._deaths += 1
        step = self._queue[0].step if self._queue else None
        what = f"the validation process of validator {rank} ended with {how}"
        again = f"from the weights of step {step}" if step is not None else "waiting for weights"
        self._kill()
        self._ready = self._busy = False
        if self._deaths >= MOST_DEATHS:
            self._gave_up = True
            warn(f"hyfi: {what}, {MOST_DEATHS} times in a row: from now on the trainers validate")
            self._send_to_followers({"kind": "kill"})
            self._send_to_trainer({"kind": "gave up"})
            return
        warn(f"hyfi: {what}; restarting it {again} (restart {self._deaths} of at most {MOST_DEATHS - 1})")
        self._round += 1
        self._replace_child(None)

    def _discard_snapshots(self) -> bool:
        """Discard received snapshots: pending ones must be received before this rank may exit."""
        before = len(self._queue)
        while self._queue and self._queue[0].arriving.test():
            self._buffers.give(self._queue.popleft().place)
        return len(self._queue) < before

    def _finish(self, stopped: bool) -> bool:
        self._send_to_followers({"kind": "end", "stopped": stopped})
        self._send_to_trainer({"kind": "bye"})
        for pending in self._sending:
            pending.wait()
        return stopped

    def _send_to_trainer(self, word: Word) -> None:
        self._sending.append(self._world.send_object(word, 0, RESULT_TAG))

    def _send_to_followers(self, word: Word) -> None:
        for rank in range(1, self._group.size):
            self._sending.append(self._group.send_object(word, rank, ORDER_TAG))

    # -- the others

    def _run_follower(self) -> bool:
        """Follow validator 0 until the children are ready, or to the end; return whether the run was stopped."""
        backoff = Backoff()
        while True:
            self._watch()
            if self._child is not None and (word := self._child.hear()) is not None:
                self._on_follower_child(word)
            found = self._group.poll_object(ORDER_TAG, 0)
            if found is None:
                backoff.pause()
                continue
            backoff.reset()
            if found[1]["kind"] in ("begun", "end"):
                return bool(found[1].get("stopped"))
            self._kill()
            if found[1]["kind"] == "start":
                self._round = found[1]["round"]
                self._replace_child(found[1]["port"])

    def _on_follower_child(self, word: Word) -> None:
        if word["kind"] == "died":
            self._kill()
            notice = {"rank": self._group.rank, "how": word["how"], "round": self._round}
            self._sending = [pending for pending in self._sending if not pending.test()]
            self._sending.append(self._group.send_object(notice, 0, DEATH_TAG))
        elif word["kind"] != "ready":
            self._fail(word)

    # -- both

    def _replace_child(self, port: int | None) -> None:
        """Start this rank's child; ``port``: of child 0, None for child 0 itself, which reports it."""
        self._kill()
        seat = {"rank": self._group.rank, "size": self._group.size, "host": self._host, "port": port}
        self._child = self._start(seat, self._buffers.descriptors)

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    @staticmethod
    def _fail(word: Word) -> None:
        if word["kind"] == "refused":
            raise RequestError(word["reason"])
        raise ValidationChildError(f"the validation process failed:\n{word['error']}")
