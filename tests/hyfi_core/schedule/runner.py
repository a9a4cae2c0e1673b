"""Runs a lowered schedule with numbers for tensors: another machine than the dry run's, which knows no names.

Ranks are coroutines. A message is only its payload: the n-th send from one rank to another meets the n-th receive
posted there, and neither side ends before the other has come. A stage's forward takes what its rank has received for
it; the numbers say whether that was the right thing.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from random import Random

from hyfi_core.schedule.action import COMPUTE, TO_WEIGHTS, Action, Schedule, Verb
from tests.hyfi_core.schedule.cases import Case

Gradients = dict[int, int]


def mix(*parts: object) -> int:
    """Return 64 bits of a digest: unlike Python's hash of tuples, no sum of two is that of two others."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass
class World:
    """What ranks share: for each ordered pair the payloads sent and the boxes posted, gangs, reductions."""

    sent: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    posted: dict[tuple[int, int], list[list[int]]] = field(default_factory=lambda: defaultdict(list))
    gangs: dict[Action, set[int]] = field(default_factory=lambda: defaultdict(set))
    shares: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    moved: bool = False

    def meet(self, pair: tuple[int, int]) -> None:
        while self.sent[pair] and self.posted[pair]:
            self.posted[pair].pop(0).append(self.sent[pair].pop(0))


def run(case: Case, schedule: Schedule, seed: int) -> list[Gradients]:
    """Run, ranks in random turns, and return for each rank the reduced gradients of its stages."""
    world, random = World(), Random(seed)
    results: list[Gradients] = [{} for _ in schedule.actions]
    ranks = {rank: Rank(case, world, rank, results[rank]).live(row) for rank, row in enumerate(schedule.actions)}
    while ranks:
        world.moved = False
        for rank in random.sample(sorted(ranks), len(ranks)):
            if next(ranks[rank], "ended") == "ended":
                del ranks[rank]
                world.moved = True
        assert world.moved, f"ranks {sorted(ranks)} wait for ever"
    assert not any(world.sent.values()), "a send was never received"
    return results


class Rank:
    """One rank and its memory."""

    def __init__(self, case: Case, world: World, number: int, result: Gradients) -> None:
        self.case, self.world, self.number, self.result = case, world, number, result
        self.kept: dict[tuple[str, int, int | None], int] = {}  # what it computed
        self.boxes: dict[Action, list[tuple[int, list[int]]]] = {}  # what it receives: (part of the sender, box)
        self.own: dict[Action, int] = {}
        self.gradients: dict[tuple[int, int], int] = defaultdict(int)

    def live(self, row: tuple[Action, ...]) -> Iterator[None]:
        for action in row:
            if action.verb in COMPUTE:
                yield from self.compute(action)
            elif action.verb.startswith("SEND"):
                self.send(action)
            elif action.verb.startswith("RECV"):
                self.post(action)
            else:
                yield from self.reduce(action.stage)
            self.world.moved = True
        for stage in [action.stage for action in row if action.verb is Verb.REDUCE]:
            owners = {
                rank
                for direction in range(1 if self.case.mirror == "point_to_point" else self.case.placement.directions)
                for rank in self.case.placement.group(stage, direction)
            }
            while set(self.world.shares[stage]) != owners:
                yield
            self.result[stage] = sum(self.world.shares[stage].values())

    def compute(self, action: Action) -> Iterator[None]:
        verb, stage, m = action.verb, action.stage, action.microbatch
        receive = Verb.RECV_F if verb is Verb.F else Verb.RECV_B
        peers = [a for a, b in self.case.edges if b == stage] if verb is Verb.F else None
        peers = [b for a, b in self.case.edges if a == stage] if peers is None else peers
        peers = [] if verb is Verb.W else peers
        taken = []
        for peer in sorted(peers):
            wanted = Action(receive, stage, action.direction, m, peer)
            while (values := self.received(wanted)) is None:
                yield
            taken.append(values)
        gang = self.case.placement.group(stage, action.direction)
        self.world.gangs[action].add(self.number)
        while self.world.gangs[action] != set(gang):
            yield
        part = gang.index(self.number)
        if verb is Verb.F:
            self.kept["F", stage, m] = mix("F", m, stage, part, tuple(taken))
        elif verb is not Verb.W:
            self.kept["B", stage, m] = mix("B", m, stage, part, self.kept["F", stage, m], tuple(taken))
        if verb in TO_WEIGHTS:
            self.gradients[stage, action.direction] += self.kept["B", stage, m]

    def received(self, action: Action) -> tuple[int, ...] | None:
        """Return what came, by part of the sender; None while something lacks."""
        found = {part: box[0] for part, box in self.boxes[action] if box}
        if action in self.own:
            found |= {self.parts(action).index(self.number): self.own[action]}
        return tuple(found[part] for part in sorted(found)) if len(found) == len(self.parts(action)) else None

    def parts(self, action: Action) -> tuple[int, ...]:
        placement = self.case.placement
        if action.verb is Verb.RECV_G:
            return (placement.group(action.stage, 1)[placement.group(action.stage, 0).index(self.number)],)
        assert action.peer is not None
        return placement.group(action.peer, action.direction)

    def send(self, action: Action) -> None:
        placement, stage, peer = self.case.placement, action.stage, action.peer
        assert peer is not None
        if action.verb is Verb.SEND_G:
            to: tuple[int, ...] = (placement.group(stage, 0)[placement.group(stage, 1).index(self.number)],)
            value, receive = self.gradients[stage, 1], Action(Verb.RECV_G, stage, 0, None, 1)
        else:
            to, kind = placement.group(peer, action.direction), action.verb[-1]
            value = self.kept[kind, stage, action.microbatch]
            receive = Action(Verb("RECV_" + kind), peer, action.direction, action.microbatch, stage)
        for other in to:
            if other == self.number:
                self.own[receive] = value
            else:
                self.world.sent[self.number, other].append(value)
                self.world.meet((self.number, other))

    def post(self, action: Action) -> None:
        self.boxes[action] = []
        for part, other in enumerate(self.parts(action)):
            if other != self.number:
                box: list[int] = []
                self.boxes[action].append((part, box))
                self.world.posted[other, self.number].append(box)
                self.world.meet((other, self.number))

    def reduce(self, stage: int) -> Iterator[None]:
        share = sum(value for (held, _), value in self.gradients.items() if held == stage)
        if self.case.mirror == "point_to_point":
            gradients = Action(Verb.RECV_G, stage, 0, None, 1)
            while (values := self.received(gradients)) is None:
                yield
            share = self.gradients[stage, 0] + values[0]
        self.world.shares[stage][self.number] = share


def reference(case: Case) -> Gradients:
    """Return the gradient of each stage, computed at once without ranks."""
    sources = [sorted(a for a, b in case.edges if b == stage) for stage in range(case.plan.stages)]
    targets = [sorted(b for a, b in case.edges if a == stage) for stage in range(case.plan.stages)]
    parts = [rows * columns for rows, columns in case.placement.grids]

    @cache
    def forward(m: int, stage: int, part: int) -> int:
        taken = tuple(tuple(forward(m, peer, p) for p in range(parts[peer])) for peer in sources[stage])
        return mix("F", m, stage, part, taken)

    @cache
    def backward(m: int, stage: int, part: int) -> int:
        taken = tuple(tuple(backward(m, peer, p) for p in range(parts[peer])) for peer in targets[stage])
        return mix("B", m, stage, part, forward(m, stage, part), taken)

    return {
        stage: sum(backward(m, stage, part) for m in range(case.plan.microbatches) for part in range(parts[stage]))
        for stage in range(case.plan.stages)
    }
