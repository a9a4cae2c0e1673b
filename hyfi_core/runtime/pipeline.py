"""The interpreter of schedules: executes the actions of a lowered schedule on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hyfi_core.cells.paged_steps import AllStays, StepMemory
from hyfi_core.comm.activity import ACTIVITY
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.comm.replay import Log, RecordingCommunicator, ReplayingCommunicator
from hyfi_core.comm.waits import Driver, Waits, waited
from hyfi_core.runtime.backward import BackwardPass, Complete, LocalValues, Record
from hyfi_core.runtime.executor import Executor, recording, replaying
from hyfi_core.runtime.losses.step_loss import StepLoss
from hyfi_core.runtime.lowered_model import HostedStage, Key, LoweredModel
from hyfi_core.runtime.stage_exchange import StageExchange
from hyfi_core.schedule.action import TO_INPUTS, TO_WEIGHTS, Action, Verb

Event = tuple[Action, float, float]
"""An action with its begin and end, in seconds."""


class Statistics(Protocol):
    """Storage of the buffers that forwards change."""

    def given(self, stage: HostedStage) -> dict[str, torch.Tensor]:
        """Return value name -> buffer, for one forward."""
        ...

    def changed(self, key: Key, microbatch: int, stage: HostedStage, values: Mapping[str, torch.Tensor]) -> None:
        """Store the buffers that a forward has changed."""
        ...


class Gradients(Protocol):
    """Reduction of gradients."""

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced, so that their completion must be recorded."""
        ...

    def complete(self, key: Key, names: Sequence[str]) -> None:
        """Record that a stage's contribution to these gradients is complete on this rank."""
        ...

    def stage_done(self) -> None:
        """Called after all backwards of a stage on this rank."""
        ...

    def send(self, stage: int) -> None:
        """Start sending a stage's gradients to the direction that owns them."""
        ...

    def expect(self, stage: int) -> None:
        """Post the receives of a stage's gradients from the other direction."""
        ...


@dataclass(frozen=True)
class Step:
    """Inputs of one step.

    Attributes:
        part: (stage, direction), micro-batch -> this rank's part of its image; None for a stage that does not read it.
        begin: (stage, direction), micro-batch, part -> the values before the first instruction.
        loss: computed by the last stage.
        parameters: (stage, direction) -> value name -> parameter.
        reads_again: whether a part may be read a second time, so that it need not be kept until its forward is computed
            again.
    """

    part: Callable[[Key, int], torch.Tensor | None]
    begin: Callable[[Key, int, torch.Tensor | None], LocalValues]
    loss: StepLoss
    parameters: Mapping[Key, LocalValues]
    reads_again: bool = False


@dataclass
class _MicroBatch:
    """One micro-batch in one stage between its forward and its backward.

    Attributes:
        records: records of the forward; empty until backward if that is recomputed.
        exits: values for other stages, until all are sent.
        leaves: leaves of the model's output, on the last stage.
        cotangents: cotangents of the values received from other stages, until all are sent.
        sends: number of edges along which the exits, then the cotangents, have been sent.
        again: (values before the forward, log of its messages), to compute the forward again; None: its records are
            kept. An image that can be read a second time is not among the values.
        memory: the paging callbacks.
    """

    records: list[Record] = field(default_factory=list)
    exits: LocalValues = field(default_factory=dict)
    leaves: list[Any] = field(default_factory=list)
    cotangents: LocalValues = field(default_factory=dict)
    sends: int = 0
    again: tuple[LocalValues, Log] | None = None
    memory: StepMemory = field(default_factory=AllStays)


class Pipeline:
    """Runs one step of a schedule.

    Args:
        lowered: the stages that this rank holds.
        groups: (stage, direction) -> its ranks.
        all_replicas: (stage, direction) -> its ranks in all replicas, for synchronised norms.
        between_planes: the ranks with the same position in all planes.
        exchange: sends and receives values and cotangents between stages.
        statistics: storage of buffers; None for prediction.
        gradients: reduction of gradients; None for prediction, whose schedule has only forwards.
        autocasting: creates the autocast context.
        recomputes: action F -> whether this forward keeps no records and is computed again in backward.
        driver: runs forwards and backwards.
        memory: creates the paging callbacks of a stage, given the tensors that must stay in memory; None: no paging.
    """

    def __init__(
        self,
        lowered: LoweredModel,
        groups: Mapping[Key, CountedCommunicator],
        all_replicas: Mapping[Key, CountedCommunicator],
        between_planes: CountedCommunicator,
        exchange: StageExchange,
        statistics: Statistics | None,
        gradients: Gradients | None,
        autocasting: Callable[[], AbstractContextManager[Any]],
        recomputes: Callable[[Action], bool],
        driver: Driver,
        memory: Callable[[HostedStage, LocalValues], StepMemory] | None = None,
    ) -> None:
        self._lowered = lowered
        self._groups = groups
        self._all_replicas = all_replicas
        self._between_planes = between_planes
        self._exchange = exchange
        self._statistics = statistics
        self._gradients = gradients
        self._autocasting = autocasting
        self._recomputes = recomputes
        self._driver = driver  # runs each action's computation, which yields where it has to wait for messages
        self._spills = memory is not None
        self._memory = (lambda stage, values: AllStays()) if memory is None else memory
        # By ((stage, direction), micro-batch): micro-batches until their backward, and backwards whose gradients of
        # weights are still to be computed.
        self._flights: dict[tuple[Key, int], _MicroBatch] = {}
        self._rests: dict[tuple[Key, int], BackwardPass] = {}
        self.outputs: dict[int, list[Any]] = {}
        self._begin_s = 0.0  # of the current action
        self._last: dict[Key, int | None] = {}  # (stage, direction) -> micro-batch that completes its gradients
        self.events: list[Event] = []

    def run(self, actions: Sequence[Action], step: Step) -> None:
        """Execute the actions.

        Afterwards, ``events`` has every action with its begin (after waiting for data) and end. Without gradients,
        ``outputs`` has the leaves of each micro-batch's output, on ranks of the last stage.
        """
        # Actions are in the order of time, so the dict keeps the last micro-batch of each stage.
        self._last = {(a.stage, a.direction): a.microbatch for a in actions if a.verb in TO_WEIGHTS}
        for action in actions:
            # Such a loss is over the whole batch: all forwards come before the first backward.
            if action.verb in TO_INPUTS and step.loss.needs_outputs:
                self._take_outputs(step.loss)
            self._begin_s = time.perf_counter()
            ACTIVITY.action = action
            self._do(action, step)
            self.events.append((action, self._begin_s, time.perf_counter()))
        # Pending sends read the memory of values, which the next step may overwrite.
        self._exchange.finish()

    def _do(self, action: Action, step: Step) -> None:
        """Run one action of the schedule."""
        # Actions on gradients have no micro-batch, and use none. An edge is (source, target) of stages.
        key, m, exchange = (action.stage, action.direction), action.microbatch or 0, self._exchange
        match action.verb:
            case Verb.F:
                self._flights[key, m] = self._driver.run(self._forward(key, m, step, self._recomputes(action)))
            case Verb.B | Verb.I:
                self._backward(key, m, step, in_two=action.verb is Verb.I)
            case Verb.W:  # the second part of a backward, which its I has left in ``_rests``
                self._rests.pop((key, m)).run_rest(self._completes(key, m))
            case Verb.SEND_F:
                self._send((action.stage, _peer(action)), key, m, back=False)
            case Verb.RECV_F:
                exchange.expect((_peer(action), action.stage), key[1], m, back=False)
            case Verb.SEND_B:
                self._send((_peer(action), action.stage), key, m, back=True)
            case Verb.RECV_B:
                exchange.expect((action.stage, _peer(action)), key[1], m, back=True)
            case Verb.REDUCE:
                self._trained.stage_done()
            case Verb.SEND_G:
                self._trained.send(action.stage)
            case Verb.RECV_G:
                self._trained.expect(action.stage)

    def _take_outputs(self, loss: StepLoss) -> None:
        """Give the loss the outputs of all micro-batches, if this rank has any: all forwards are done."""
        flights = {m: flight for (key, m), flight in self._flights.items() if self._is_last(key)}
        for flight in flights.values():
            # Other cells have run since, and the pager may have spilled them.
            flight.memory.need(flight.leaves)
        if flights:
            loss.take({m: flight.leaves for m, flight in sorted(flights.items(), key=lambda item: item[0])})

    def _is_last(self, key: Key) -> bool:
        return key[0] == len(self._lowered.parameters) - 1

    def _send(self, edge: tuple[int, int], key: Key, microbatch: int, back: bool) -> None:
        """Start sending a micro-batch's values or cotangents along an edge; drop them after the last of their edges."""
        flight = self._flights[key, microbatch]
        leaving = flight.cotangents if back else flight.exits
        # They are packed outside of the tape's steps, where the pager does not load them by itself.
        flight.memory.need(leaving)
        self._exchange.send(edge, key[1], microbatch, leaving, back)
        flight.sends += 1
        # Cotangents are sent along the edges that end at this stage, values along those that begin here.
        edges = sum(key[0] == (target if back else source) for source, target in self._lowered.boundaries)
        if flight.sends == edges and back:
            del self._flights[key, microbatch]
        elif flight.sends == edges:
            flight.exits.clear()

    def _forward(self, key: Key, microbatch: int, step: Step, recomputes: bool) -> Waits[_MicroBatch]:
        """Run the forward of a micro-batch in a stage; return what its backward needs."""
        stage, flight = self._lowered.hosted[key], _MicroBatch()
        values = step.begin(key, microbatch, step.part(key, microbatch))
        if self._statistics is not None:
            values.update(self._statistics.given(stage))
        flight.memory = self._memory(stage, values)
        # Yields instead of waiting: other cells of the process may have to send first.
        entries = yield from self._exchange.values(*key, microbatch)
        # They may be the memory of messages, which belongs to the stage exchange.
        flight.memory.stay(entries)
        values.update(entries)
        self._begin_s = time.perf_counter()  # a forward begins when its inputs have arrived
        executor, trains = self._executor(stage, key, flight), self._gradients is not None
        if trains and recomputes:
            # Messages are not sent again: what is received now is recorded, and replayed in backward.
            log: Log = []
            comms = self._groups[key], self._all_replicas[key], self._between_planes
            recorder, all_replicas, between_planes = (RecordingCommunicator(c, log, self._spills) for c in comms)
            # Copies of the buffers that this forward changes: the second one must start from the same values.
            buffers = _changing(stage, values)
            flight.memory.stay(buffers)
            left_out = stage.ranked.program.image if step.reads_again else None
            # A dict of its own: the forward removes values from ``values`` as soon as no step needs them.
            flight.again = ({name: value for name, value in values.items() if name != left_out} | buffers, log)
            logs_statistics = recording(log, self._spills)
            executor = Executor(stage.tape, recorder, all_replicas, flight.memory, between_planes, logs_statistics)
        tape = executor.forward(values, record=trains and not recomputes)
        flight.records = yield from self._driver.within(self._autocasting, tape)
        if self._statistics is not None:
            # The tape has ended, so the pager no longer knows of a use of these buffers.
            flight.memory.need([values[name] for name in stage.ranked.program.mutations.values()])
            self._statistics.changed(key, microbatch, stage, values)
        flight.exits = {name: values[name] for name in stage.ranked.exits}
        flight.leaves = self._lowered.leaves(stage, values)
        if self._gradients is None and self._is_last(key):
            flight.memory.stay(flight.leaves)
            self.outputs[microbatch] = flight.leaves
        return flight

    def _backward(self, key: Key, microbatch: int, step: Step, in_two: bool) -> None:
        """Run the backward of a micro-batch in a stage; ``in_two``: its first part, the second stays in ``_rests``."""
        flight = self._flights[key, microbatch]
        # From here on ``sends`` counts the edges along which cotangents have been sent.
        flight.sends = 0
        cotangents = waited(self._exchange.cotangents(*key, microbatch))
        self._begin_s = time.perf_counter()
        # For the pager: cotangents may be the memory of messages and are not spilled, the output's leaves are loaded.
        flight.memory.stay(cotangents)
        flight.memory.need(flight.leaves)
        for name, cotangent in self._from_loss(key, flight, microbatch, step).items():
            cotangents[name] = cotangents[name] + cotangent if name in cotangents else cotangent
        self._driver.run(self._run_back(key, microbatch, cotangents, step, in_two))
        # A first stage sends no cotangents, so ``_send`` will not remove its flight.
        if not any(target == key[0] for _, target in self._lowered.boundaries):
            del self._flights[key, microbatch]

    def _run_back(self, key: Key, microbatch: int, cotangents: LocalValues, step: Step, in_two: bool) -> Waits[None]:
        """Run a micro-batch's records backward, after its forward if that is recomputed."""
        flight, parameters = self._flights[key, microbatch], step.parameters[key]
        if flight.again is not None:
            yield from self._run_again(key, microbatch, step)
        executor = self._executor(self._lowered.hosted[key], key, flight)
        if in_two:
            first = executor.backward_in_two(flight.records, cotangents, parameters)
            flight.cotangents, self._rests[key, microbatch] = yield from first
        else:
            complete = self._completes(key, microbatch)
            back = executor.backward(flight.records, cotangents, parameters, complete=complete)
            flight.cotangents = yield from back

    def _run_again(self, key: Key, microbatch: int, step: Step) -> Waits[None]:
        """Compute a forward once more, and keep the records that its backward needs."""
        stage, flight = self._lowered.hosted[key], self._flights[key, microbatch]
        assert flight.again is not None
        values, log = flight.again
        if step.reads_again and (part := step.part(key, microbatch)) is not None:
            # ``_forward`` has left the image out of ``again``, so that it was not kept in between.
            values[stage.ranked.program.image] = part
            del part  # only ``values`` may hold it: the forward frees it by removing it from there
        # Received messages are replayed: other ranks do not compute their forward again at the same time.
        comms = self._groups[key], self._all_replicas[key], self._between_planes
        comm, all_replicas, between_planes = (ReplayingCommunicator(log, c.rank, c.size) for c in comms)
        # Random operators draw the same numbers: their key is a value, not a generator's state.
        executor = Executor(stage.tape, comm, all_replicas, flight.memory, between_planes, replaying(log))
        tape = executor.forward(values, record=True)
        flight.records = yield from self._driver.within(self._autocasting, tape)
        flight.again = None

    def _completes(self, key: Key, microbatch: int) -> Complete | None:
        """Return the function to call with complete gradients; None before the last micro-batch of a stage."""
        gradients = self._trained
        # Until then, a gradient is only a part of its sum and must not be reduced.
        if self._last[key] != microbatch or not gradients.reduces:
            return None
        return lambda names: gradients.complete(key, names)

    @property
    def _trained(self) -> Gradients:
        assert self._gradients is not None, "a prediction has no backward"
        return self._gradients

    def _executor(self, stage: HostedStage, key: Key, flight: _MicroBatch) -> Executor:
        """Return an executor that sends messages; a recomputed forward has one that replays them."""
        return Executor(stage.tape, self._groups[key], self._all_replicas[key], flight.memory, self._between_planes)

    def _from_loss(self, key: Key, flight: _MicroBatch, microbatch: int, step: Step) -> LocalValues:
        """Add a micro-batch's loss to the step's; return output -> cotangent, empty unless this is the last stage."""
        if not self._is_last(key):
            return {}
        # The output is replicated, its cotangent a sum over ranks: zero on all ranks but one.
        leads = self._groups[key].rank == self._between_planes.rank == 0
        cotangents = step.loss.cotangents(microbatch, flight.leaves, leads)
        # Freed now: outputs may be whole maps, and the flight stays until its cotangents have been sent.
        flight.leaves = []
        outputs = self._lowered.hosted[key].ranked.outputs
        return {
            item.name: cotangent for item, cotangent in zip(outputs, cotangents, strict=True) if cotangent is not None
        }


def _changing(stage: HostedStage, values: LocalValues) -> LocalValues:
    """Return copies of the buffers that forwards change, before another micro-batch's has changed them."""
    program = stage.ranked.program
    return {value: values[value].clone() for value, name in program.buffers.items() if name in program.mutations}


def _peer(action: Action) -> int:
    assert action.peer is not None
    return action.peer
