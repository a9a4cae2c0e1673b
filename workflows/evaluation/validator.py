"""Validation while training continues: validators are ranks that supervise child processes, which compute.

::

    trainer 0                       validator 0 ── its child            validator 1 … ── their children
      work {step, bytes}   ──────►    posts a receive
      snapshot             ──────►      into memory shared with its child
      … continues …                   {validate} ──► broadcasts the weights to the other children;
                                                     all evaluate, slide by slide, over gloo
                           ◄──────    result     ◄──
                                      if a child dies, it is reported, and all children are restarted with the same
                                      snapshot; the third time:
                           ◄──────    gave up                          {kill}  ──────►
      work {end}           ──────►                                     {end}   ──────►
                           ◄──────    bye

A child that *dies* (killed, out of memory, a crash in a library) is replaced. If a child *raises* an exception, a new
child would raise it, too, so the run fails with this error. Children do not use MPI, so their end does not end the job.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.loading.backoff import Backoff
from hyfi_core.comm.activity import ACTIVITY
from hyfi_core.comm.base import Communicator, Message, Pending
from hyfi_core.errors import RequestError
from workflows.console import warn
from workflows.evaluation.shared_buffers import SharedBuffer, SharedBuffers
from workflows.evaluation.validation_client import QUEUE, RESULT_TAG, SNAPSHOT_TAG, WORK_TAG
from workflows.launch.child_process import LOST_PEER, ChildMessage, ChildProcess

ORDER_TAG, DEATH_TAG = 113, 114
MAX_DEATHS = 3
"""Number of crashes without a finished validation after which the validators give up."""

Start = Callable[[Mapping[str, Any], Sequence[int]], ChildProcess]
"""(rendezvous, descriptors) → a new child; rendezvous: ``rank``, ``size``, and ``host`` and ``port`` of child 0."""


class ValidationChildError(RuntimeError):
    """A child process raised an exception; the message has its traceback."""


@dataclass
class _QueuedSnapshot:
    """Weights of one step, until their metrics are there.

    Attributes:
        step: The step.
        buffer: Memory shared with the child, into which they are received.
        pending: The receive; the child may read them when it is done.
    """

    step: int
    buffer: SharedBuffer
    pending: Pending


class ValidationService:
    """One validator: starts, supervises and replaces its child process.

    Args:
        world: All ranks.
        group: The validators; rank 0 of it communicates with trainer 0.
        start: Starts this rank's child.
        check_signals: Called between messages, for signals; may raise.
    """

    def __init__(
        self, world: Communicator, group: Communicator, start: Start, check_signals: Callable[[], None] = lambda: None
    ) -> None:
        self._world, self._group, self._start, self._check_signals = world, group, start, check_signals
        self._is_leader = group.rank == 0
        self._buffers = SharedBuffers(QUEUE if self._is_leader else 0)
        self._child: ChildProcess | None = None
        self._round = 0  # how often all children were restarted
        self._host = ""  # of child 0
        self._sending: list[Pending] = []
        self._queue: deque[_QueuedSnapshot] = deque()
        self._end: ChildMessage | None = None  # the message of trainer 0 that ends the service
        self._ready = self._busy = self._gave_up = False  # whether the child waits for weights, or evaluates some
        self._deaths = 0  # of children, since the last result

    def begin(self) -> None:
        """Start the children and return when they are ready (collective over the group).

        Raises:
            RequestError: The children cannot run the configuration.
            ValidationChildError: One of them raised an exception.
        """
        hosts = self._group.broadcast_object(self._group.gather_objects(socket.gethostname()))
        # On one host, children need no network at all.
        self._host = hosts[0] if len(set(hosts)) > 1 else "localhost"
        if not self._is_leader:
            self._run_follower()
            return
        self._replace_child(port=None)  # child 0, which chooses the port that the others need
        self._run_leader(lambda: self._ready or self._gave_up or self._end is not None)
        self._send_to_followers({"kind": "begun"})

    def serve(self) -> bool:
        """Serve until trainer 0 ends the service; return whether the run was stopped before its end."""
        ACTIVITY.action = "validating snapshots"  # for the other ranks' messages if this one hangs
        try:
            if not self._is_leader:
                return self._run_follower()
            self._run_leader(lambda: self._end is not None and not self._queue)
            assert self._end is not None
            return self._finish(bool(self._end["stopped"]))
        finally:
            self._kill_child()
            self._buffers.close()

    # -- validator 0

    def _run_leader(self, is_over: Callable[[], bool]) -> None:
        """Receive messages and advance the child until the service is over; pause while nothing happens."""
        backoff = Backoff()
        while not is_over():
            # `|`, not `or`: both must run in every round.
            if self._receive() | self._advance_child():
                backoff.reset()
            else:
                backoff.pause()

    def _receive(self) -> bool:
        """Handle messages of trainer 0 and of the other validators; return whether trainer 0 sent any."""
        self._check_signals()
        self._sending = [pending for pending in self._sending if not pending.test()]
        received = False
        while (work := self._world.poll_object(WORK_TAG, 0)) is not None:
            received = True
            _, message = work
            if message["kind"] == "end":
                self._end = message
            else:
                buffer = self._buffers.acquire(message["bytes"])
                # Received straight into the memory that the child reads: no copy between the processes.
                pending = self._world.exchange([], [Message(0, buffer.flat, SNAPSHOT_TAG)])
                self._queue.append(_QueuedSnapshot(message["step"], buffer, pending))
        while (death := self._group.poll_object(DEATH_TAG)) is not None:
            _, notice = death
            self._on_death_notice(notice)
        return received

    def _advance_child(self) -> bool:
        """Handle a message of the child and give it its next work; return whether anything happened."""
        # The children's work is not needed any more; what trainer 0 has sent must still be received.
        if self._gave_up or (self._end is not None and (self._end["stopped"] or self._end["discard"])):
            self._kill_child()
            return self._discard_snapshots()
        assert self._child is not None
        message = self._child.receive()
        if message is not None:
            self._on_leader_child(message)
        # The snapshot stays in the queue until its result: a new child gets it again.
        if self._ready and not self._busy and self._queue and self._queue[0].pending.test():
            snapshot = self._queue[0]
            self._busy = True
            self._child.send(
                {
                    "kind": "validate",
                    "step": snapshot.step,
                    "bytes": snapshot.buffer.flat.numel(),
                    "descriptor": snapshot.buffer.descriptor,
                }
            )
            return True
        return message is not None

    def _on_leader_child(self, message: ChildMessage) -> None:
        """Handle a message of the child of validator 0."""
        if message["kind"] == "port":
            self._send_to_followers({"kind": "start", "port": message["port"], "round": self._round})
        elif message["kind"] == "ready":
            self._ready = True
        elif message["kind"] == "result":
            snapshot = self._queue.popleft()
            self._buffers.release(snapshot.buffer)
            # Only deaths in a row count: a child that finishes a validation shows that it can.
            self._busy, self._deaths = False, 0
            self._send_to_trainer({"kind": "result", "step": snapshot.step, "metrics": message["metrics"]})
        elif message["kind"] == "died":
            self._on_death(0, message["how"])
        else:
            self._fail(message)

    def _on_death_notice(self, notice: ChildMessage) -> None:
        """Handle the death of another validator's child; report it even if the children were restarted already."""
        # Of an earlier round: those children are gone already, and starting again would kill the new ones.
        if notice["round"] == self._round and not self._gave_up:
            self._on_death(notice["rank"], notice["how"])
        elif notice["how"] != LOST_PEER:
            warn(f"hyfi: the validation process of validator {notice['rank']} ended with {notice['how']}")

    def _on_death(self, rank: int, how: str) -> None:
        """Report the death of a validator's child, and restart all children or give up."""
        self._deaths += 1
        step = self._queue[0].step if self._queue else None
        cause = f"the validation process of validator {rank} ended with {how}"
        resumed = f"from the weights of step {step}" if step is not None else "waiting for weights"
        self._kill_child()
        self._ready = self._busy = False
        if self._deaths >= MAX_DEATHS:
            self._gave_up = True
            warn(f"hyfi: {cause}, {MAX_DEATHS} times in a row: the trainers validate from now on")
            self._send_to_followers({"kind": "kill"})
            self._send_to_trainer({"kind": "gave up"})
            return
        warn(f"hyfi: {cause}; restarting it {resumed} (restart {self._deaths} of at most {MAX_DEATHS - 1})")
        # Only child 0: when it reports its port, the others are started with it.
        self._round += 1
        self._replace_child(port=None)

    def _discard_snapshots(self) -> bool:
        """Discard snapshots that have arrived; this rank may exit only after it has received all of them."""
        before = len(self._queue)
        while self._queue and self._queue[0].pending.test():
            self._buffers.release(self._queue.popleft().buffer)
        return len(self._queue) < before

    def _finish(self, stopped: bool) -> bool:
        """Tell the other validators and trainer 0 that the service ends; return ``stopped`` once all is sent."""
        self._send_to_followers({"kind": "end", "stopped": stopped})
        self._send_to_trainer({"kind": "bye"})
        for pending in self._sending:
            pending.wait()
        return stopped

    def _send_to_trainer(self, message: ChildMessage) -> None:
        self._sending.append(self._world.send_object(message, 0, RESULT_TAG))

    def _send_to_followers(self, message: ChildMessage) -> None:
        for rank in range(1, self._group.size):
            self._sending.append(self._group.send_object(message, rank, ORDER_TAG))

    # -- other validators

    def _run_follower(self) -> bool:
        """Follow validator 0 until the children are ready, or until the end; return whether the run was stopped."""
        backoff = Backoff()
        while True:
            self._check_signals()
            if self._child is not None and (message := self._child.receive()) is not None:
                self._on_follower_child(message)
            order = self._group.poll_object(ORDER_TAG, 0)
            if order is None:
                backoff.pause()
                continue
            backoff.reset()
            _, message = order
            if message["kind"] in ("begun", "end"):
                return bool(message.get("stopped"))
            # Every other order ends the old child: "kill", or "start" after the death of another validator's child.
            self._kill_child()
            if message["kind"] == "start":
                self._round = message["round"]
                self._replace_child(message["port"])

    def _on_follower_child(self, message: ChildMessage) -> None:
        """Handle a message of the child of another validator than 0."""
        if message["kind"] == "died":
            self._kill_child()
            notice = {"rank": self._group.rank, "how": message["how"], "round": self._round}
            # Messages that have left need not be kept.
            self._sending = [pending for pending in self._sending if not pending.test()]
            self._sending.append(self._group.send_object(notice, 0, DEATH_TAG))
        elif message["kind"] != "ready":
            self._fail(message)

    # -- all validators

    def _replace_child(self, port: int | None) -> None:
        """Start this rank's child; ``port``: that of child 0, None for child 0 itself, which chooses it."""
        self._kill_child()
        rendezvous = {"rank": self._group.rank, "size": self._group.size, "host": self._host, "port": port}
        self._child = self._start(rendezvous, self._buffers.descriptors)

    def _kill_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    @staticmethod
    def _fail(message: ChildMessage) -> None:
        """Raise the error that a child has reported."""
        if message["kind"] == "refused":
            raise RequestError(message["reason"])
        raise ValidationChildError(f"the validation process failed:\n{message['error']}")
