"""Lowered schedules over thread-ranks in strict mode: rendezvous, no tags, one stream for each ordered pair."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest
import torch

from hyfi_core.comm.base import Communicator, Message, Pending
from hyfi_core.comm.pair_channels import with_pair_channels
from hyfi_core.comm.threads import DeadlockError, run_ranks
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import COMPUTE, TO_WEIGHTS, Action, Schedule, Verb
from hyfi_core.schedule.fault import ScheduleError
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.routes import counterpart, receivers, senders
from hyfi_core.schedule.simulate import simulate
from tests.hyfi_core.schedule.cases import RECEIVES, SCHEDULES, SENDS, Case, draw_case
from tests.hyfi_core.schedule.runner import mix, reference


class StrictRank:
    """Does what a list says, with one number for a tensor; a gang is a barrier of the stage's own communicator."""

    def __init__(self, case: Case, comm: Communicator) -> None:
        self.case, self.comm, self.placement = case, comm, case.placement
        self.stages: dict[tuple[int, int], Communicator] = {}
        for direction in range(self.placement.directions):
            for stage in range(self.placement.stages):
                ranks = self.placement.group(stage, direction)
                part = ranks.index(comm.rank) if comm.rank in ranks else None
                group = comm.split(None if part is None else 0, part or 0)
                if group is not None:
                    self.stages[stage, direction] = group
        self.kept: dict[tuple[Verb, int, int | None], int] = {}
        self.gradients: dict[tuple[int, int], int] = defaultdict(int)
        self.boxes: dict[Action, tuple[list[torch.Tensor], Pending]] = {}
        self.own: dict[Action, int] = {}

    def run(self, row: tuple[Action, ...]) -> dict[int, int]:
        leaving = []
        shares: dict[int, int] = {}
        for action in row:
            if action.verb in COMPUTE:
                self.compute(action)
            elif action.verb in RECEIVES:
                self.post(action)
            elif action.verb in SENDS:
                leaving.append(self.send(action))
            else:
                shares[action.stage] = self.share(action.stage)
        for pending, _ in leaving:
            pending.wait()
        return shares

    def compute(self, action: Action) -> None:
        forward, m = action.verb is Verb.F, action.microbatch
        links = [a for a, b in self.case.edges if b == action.stage]
        links = links if forward else [b for a, b in self.case.edges if a == action.stage]
        links = [] if action.verb is Verb.W else links
        receive = Verb.RECV_F if forward else Verb.RECV_B
        taken = tuple(self.taken(Action(receive, action.stage, action.direction, m, peer)) for peer in sorted(links))
        group = self.stages[action.stage, action.direction]
        group.barrier()
        kind = Verb.F if forward else Verb.B
        if action.verb is not Verb.W:
            known = () if forward else (self.kept[Verb.F, action.stage, m],)
            self.kept[kind, action.stage, m] = mix(str(kind), m, action.stage, group.rank, *known, taken)
        if action.verb in TO_WEIGHTS:
            self.gradients[action.stage, action.direction] += self.kept[kind, action.stage, m]

    def post(self, action: Action) -> None:
        sending = senders(self.placement, self.comm.rank, action)
        boxes = [torch.zeros(1, dtype=torch.int64) for _ in sending]
        pairs = [Message(sender, box) for sender, box in zip(sending, boxes, strict=True) if sender != self.comm.rank]
        self.boxes[action] = (boxes, self.comm.exchange([], pairs))

    def taken(self, action: Action) -> tuple[int, ...]:
        boxes, pending = self.boxes.pop(action)
        pending.wait()
        for sender, box in zip(senders(self.placement, self.comm.rank, action), boxes, strict=True):
            if sender == self.comm.rank:
                box.fill_(self.own.pop(action))
        return tuple(int(box) for box in boxes)

    def send(self, action: Action) -> tuple[Pending, list[Message]]:
        if action.verb is Verb.SEND_G:
            value = wrapped(self.gradients[action.stage, 1])
        else:
            value = self.kept[Verb(action.verb[-1]), action.stage, action.microbatch]
        messages = []
        for receiver in receivers(self.placement, self.comm.rank, action):
            if receiver == self.comm.rank:
                self.own[counterpart(action)] = value
            else:
                messages.append(Message(receiver, torch.tensor([value])))
        return self.comm.exchange(messages, []), messages

    def share(self, stage: int) -> int:
        if self.case.mirror == "point_to_point":
            return self.gradients[stage, 0] + self.taken(Action(Verb.RECV_G, stage, 0, None, 1))[0]
        return sum(value for (held, _), value in self.gradients.items() if held == stage)


def wrapped(value: int) -> int:
    """A number as 64 bits hold it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def check(case: Case, schedule: Schedule, one_stream: bool = False) -> None:
    def body(comm: Communicator) -> dict[int, int]:
        return StrictRank(case, comm if one_stream else with_pair_channels(comm)).run(schedule.actions[comm.rank])

    shares = run_ranks(case.placement.size, body, strict=True)
    for stage, wanted in reference(case).items():
        assert wrapped(sum(share.get(stage, 0) for share in shares)) == wrapped(wanted)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grids", [((1, 1),) * 4, ((2, 2), (1, 1)), ((1, 2), (2, 1), (1, 1))])
def test_every_schedule_keeps_to_the_strict_rules(schedule: str, grids: tuple[tuple[int, int], ...]) -> None:
    plan = ParallelPlan(grids, schedule=schedule, microbatches=4)
    placement = Placement.of(plan)
    edges = [(s, t) for s in range(plan.stages) for t in range(s + 1, min(s + 3, plan.stages))]
    case = Case(plan, placement, tuple(edges), generate(plan, placement), True)
    check(case, case.lowered())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_stream_for_all_messages_of_a_rank_dead_locks_as_the_dry_run_says(schedule: str) -> None:
    plan = ParallelPlan(((1, 1),) * 2, schedule=schedule, microbatches=4)
    placement = Placement.of(plan)
    case = Case(plan, placement, ((0, 1),), generate(plan, placement), True)
    with pytest.raises(ScheduleError, match="deadlock of messages in one stream") as refused:
        simulate(case.lowered(), placement, case.edges, one_stream=True)
    blocked = {blame.rank: blame.why for blame in refused.value.blames}
    assert set(blocked) == {0, 1}
    for rank, why in blocked.items():
        assert f"waits for rank {1 - rank}, whose" in why and f"rank {rank}," not in why
    with pytest.raises(DeadlockError):
        check(case, case.lowered(), one_stream=True)


@pytest.mark.parametrize("seed", range(12))
def test_random_plans_in_random_orders_keep_to_the_strict_rules(seed: int) -> None:
    case = draw_case(Random(seed).randint)
    check(case, case.lowered())


def test_without_tags_a_swapped_receive_takes_the_wrong_message() -> None:
    plan = ParallelPlan(((1, 1), (1, 1)), schedule="gpipe", microbatches=2)
    placement = Placement.of(plan)
    case = Case(plan, placement, ((0, 1),), generate(plan, placement), True)
    text = case.lowered().to_text()
    right, wrong = "RECV_F0.s1.d0<s0 RECV_F1.s1.d0<s0", "RECV_F1.s1.d0<s0 RECV_F0.s1.d0<s0"
    assert right in text
    with pytest.raises(AssertionError):
        check(case, Schedule.from_text(text.replace(right, wrong)))
