"""Lowering: a captured program and a grid become what each rank does.

Every value is *split* (each rank holds its part) or *replicated* (each holds it whole). Rules, one for each operator,
say which it is and what it takes; what they refuse is refused here, before any rank talks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NoReturn

import torch

from hyfi_core.capture.program import Operator, Program, Ref, ValueInfo, refs_in, substitute
from hyfi_core.errors import RequestError
from hyfi_core.lowering.fused_cost import choose
from hyfi_core.lowering.fused_halo import Runs, covers
from hyfi_core.lowering.fused_sketch import draw
from hyfi_core.lowering.in_place import overwriting
from hyfi_core.ops.base import Collective
from hyfi_core.ops.cut import cut
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.plan.box import Box, hull
from hyfi_core.plan.layout import Layout
from hyfi_core.plan.transfer import Transfer, plan_transfer
from hyfi_core.rules.alternatives import INSTEAD
from hyfi_core.rules.features import batch_norm_alone, batch_norm_on_features
from hyfi_core.rules.instructions import Communicate, Compute, Instruction, RankProgram, Split

Rule = Callable[["Lowering", Operator], None]


@dataclass(frozen=True)
class _ReadImage:
    """Stands for a cut-out of the image until all cut-outs, and so what the rank reads, are known."""

    name: str
    need: Box
    fill: float


class Lowering:
    """Builds one rank's instructions; rules call its methods.

    Args:
        program: the captured model.
        grid: rows and columns of ranks.
        rank: whose instructions.
        rules: text form of an operator -> its rule.
        entries: values that come from other stages -> how they are split here, None for a replicated one.
        fused_halo: most windows for one exchange along any path, or "auto"; 1: an exchange before each.
        replicas: over how many times the samples of this replica batch norms take their statistics.

    Attributes:
        able: operators whose rules asked what to compute: they may stand inside a fused run.
    """

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int],
        rank: int,
        rules: dict[str, Rule],
        entries: Mapping[str, Split | None] | None = None,
        fused_halo: int | str = 1,
        replicas: Fraction | int = 1,
    ) -> None:
        self.program = program
        self.grid = grid
        self.rank = rank
        self.values: dict[str, ValueInfo] = dict(program.values)
        self.splits: dict[str, Split] = {}
        self._rules = rules
        self._steps: list[Instruction | _ReadImage] = []
        self._made = 0
        self.able: set[str] = set()
        self.runs = Runs()
        self._entries = entries
        self._fused_halo = fused_halo
        self.replicas = replicas
        self._shared: dict[str, str] = {}
        self._cuts: dict[tuple[str, tuple[Box, ...], float], str] = {}
        height, width = program.values[program.image].shape[-2:]
        self.splits[program.image] = Split(Layout.even(height, width, grid))
        self.splits.update({name: split for name, split in (entries or {}).items() if split is not None})

    def run(self, wanted: tuple[Any, ...], exits: tuple[str, ...] = ()) -> RankProgram:
        """Return the instructions that compute the ``wanted`` outputs, the ``exits`` and every mutation.

        Outputs are gathered where they are split; exits go on to other stages as they are.

        Raises:
            RequestError: an operator has no rule for how its maps are split, or a buffer would hold a whole map.
        """
        program = self.program
        roots = {*refs_in(wanted), *exits, *program.mutations.values()}
        alive = program.needed(roots)
        operators = [op for op in program.operators if any(o in alive for o in op.outputs if o is not None)]
        if self._fused_halo != 1 and self.grid != (1, 1):
            self.runs = self._plan_runs(operators, wanted, exits)
        for op in operators:
            self._lower(op)
        outputs = tuple(Ref(self.whole(item.name)) if isinstance(item, Ref) else item for item in wanted)
        for name in program.mutations.values():
            if name in self.splits:
                raise RequestError("the model stores a whole map in a buffer, which no rank holds")
        instructions, read_box = self._finish()
        return overwriting(RankProgram(instructions, read_box, self.splits, outputs, program, self.values, exits))

    def _plan_runs(self, operators: list[Operator], wanted: tuple[Any, ...], exits: tuple[str, ...]) -> Runs:
        """Return the fused runs; a trial without any says how every value is laid out."""
        trial = Lowering(self.program, self.grid, self.rank, self._rules, self._entries, replicas=self.replicas)
        trial.run(wanted, exits)
        return choose(draw(self.program, operators, trial.splits, trial.able, exits), self._fused_halo)

    def _lower(self, op: Operator) -> None:
        rule = self._rules.get(op.text)
        if not any(name in self.splits for name in op.inputs):
            if rule is not None and draws_numbers(op):
                rule(self, op)
            else:
                lower_replicated(self, op)
        elif self.grid == (1, 1):
            self._lower_alone(op, rule)
        elif rule is not None:
            rule(self, op if op.name in self.runs.inside else self._trimmed(op))
        else:
            instead = INSTEAD.get(op.text, "another operator")
            self.refuse(op, "has no rule for maps that are split over ranks", f"{instead}; or a grid of one rank")

    def _lower_alone(self, op: Operator, rule: Rule | None) -> None:
        """One rank holds every map whole: where no rule takes the operator as it is, the operator itself will do."""
        emitted = len(self._steps)
        try:
            if rule is not None:
                rule(self, op)
                return
        except RequestError:
            del self._steps[emitted:]
        lower_replicated(self, renamed(op, {name: self.whole(name) for name in op.inputs}))

    def _trimmed(self, op: Operator) -> Operator:
        """Return an operator that ends a fused run: it takes what ranks own, and no margins."""
        wide = [name for name in dict.fromkeys(op.inputs) if name in self.splits and self.splits[name].boxes]
        return renamed(op, {name: self._owned(name) for name in wide}) if wide else op

    # -- what rules ask

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a value."""
        return self.values[name].shape

    def split_of(self, argument: Any) -> Split | None:
        """Return how an argument is split, None for a replicated value or a constant."""
        return self.splits.get(argument.name) if isinstance(argument, Ref) else None

    def computed(self, op: Operator, split: Split) -> Split:
        """Return a layout of an operator's results with what each rank computes of them: in a fused run, more."""
        self.able.add(op.name)
        return replace(split, boxes=self.runs.computed.get(op.name))

    def seen(self, op: Operator, name: str) -> Split:
        """Return how a map must be held for an operator whose results have the same pixels."""
        return self.computed(op, self.splits[name])

    def refuse(self, op: Operator, what: str, instead: str) -> NoReturn:
        """Refuse an operator by name.

        Raises:
            RequestError: always.
        """
        where = f" in module {op.module!r}" if op.module else ""
        raise RequestError(f"{op.text}{where} {what}; what works: {instead}")

    # -- what rules emit

    def part(self, name: str, split: Split) -> str:
        """Return the name of the value laid out as ``split``, moved there if it is laid out otherwise."""
        here = self.splits[name]
        if here == split and name != self.program.image:
            return name
        if here.dims != split.dims:
            raise AssertionError(f"{name} has space in dims {here.dims}, asked for {split.dims}")
        return self.moved(name, split.held, split)

    def moved(self, name: str, need: Sequence[Box], split: Split | None = None, fill: float = 0.0) -> str:
        """Return the name of a value that holds, on each rank, the box that it needs.

        Args:
            name: a split value.
            need: one box for each rank; outside the map is filled with ``fill``.
            split: how the result is split, if it is a value that other rules may use.
            fill: value outside the map.
        """
        here = self.splits[name]
        if name != self.program.image:
            if tuple(need) == here.held:
                return name
            source = self._covering(name, need)
            if source is not None:
                return self._cut(source, tuple(need), split, fill)
            name = self._owned(name)
        result = self.fresh(name)
        if split is not None:
            self.splits[result] = split
        if name == self.program.image:
            self._steps.append(_ReadImage(result, need[self.rank], fill))
        else:
            transfer = plan_transfer(here.layout.parts, need, here.layout.map, self.rank)
            self.communicate(Redistribute(transfer, here.dims, fill), (name,), (result,), "halo")
        return result

    def _covering(self, name: str, need: Sequence[Box]) -> str | None:
        """Return a value that holds on every rank what it needs of ``name``; the exchange that a run shares is made."""
        here = self.splits[name]
        if here.boxes is not None and covers(here.boxes, need, here.layout.map):
            return name
        shared = self.runs.shared.get(name)
        if shared is None or not covers(shared, need, here.layout.map):
            return None
        if name not in self._shared:
            transfer = plan_transfer(here.layout.parts, shared, here.layout.map, self.rank)
            self._shared[name] = wide = self.fresh(name)
            self.splits[wide] = Split(here.layout, here.dims, shared)
            self.communicate(Redistribute(transfer, here.dims), (self._owned(name),), (wide,), "halo")
        return self._shared[name]

    def _owned(self, name: str) -> str:
        """Return the name of what each rank owns of a value; margins are cut off."""
        here = self.splits[name]
        return name if here.boxes is None else self._cut(name, here.layout.parts, here.owned, 0.0)

    def _cut(self, name: str, need: tuple[Box, ...], split: Split | None, fill: float) -> str:
        """Return the name of a smaller or padded box of what each rank holds; nothing is sent."""
        key = (name, need, fill)
        if key not in self._cuts:
            here = self.splits[name]
            self._cuts[key] = result = self.fresh(name)
            local = cut(here.held[self.rank], need[self.rank], here.layout.map, here.dims, fill)
            self.compute(local, (name,), (result,))
        if split is not None:
            self.splits[self._cuts[key]] = split
        return self._cuts[key]

    def whole(self, name: str) -> str:
        """Return the name of a replicated value: the map gathered on every rank if it was split."""
        split = self.splits.get(name)
        if split is None:
            return name
        ranks = len(split.layout.parts)
        result = self.moved(name, [split.layout.map] * ranks)
        if result == name:  # one rank holds all of it anyway
            result = self.fresh(name)
            self.compute(_itself, (name,), (result,))
        return result

    def fresh(self, name: str) -> str:
        """Return a new name for something made from ``name``; global shape and type are taken over."""
        self._made += 1
        result = f"{name}~{self._made}"
        self.values[result] = self.values[name]
        return result

    def compute(
        self,
        function: Callable[..., Any],
        inputs: tuple[str, ...],
        outputs: tuple[str | None, ...],
        split: Split | None = None,
        operator: Operator | None = None,
    ) -> None:
        """Emit a local call; with ``split`` its outputs are split so, and ranks that own nothing of them skip it.

        ``operator`` says that the call is one of the model's, so that it may be made in place (see ``overwriting``).
        """
        empty = None
        if split is not None:
            for output in outputs:
                if output is not None:
                    self.splits[output] = split
            if split.held[self.rank].empty:
                empty = tuple(split.local_shape(self.shape(o), self.rank) if o is not None else () for o in outputs)
        self._steps.append(Compute(function, inputs, outputs, empty, operator))

    def communicate(
        self,
        collective: Collective,
        inputs: tuple[str | None, ...],
        outputs: tuple[str | None, ...],
        kind: str,
        copies: bool = False,
    ) -> None:
        """Emit a communicating operator; ``kind`` is what traffic counts it as, ``copies``: over all replicas."""
        self._steps.append(Communicate(collective, inputs, outputs, kind, copies))

    def _finish(self) -> tuple[tuple[Instruction, ...], Box]:
        """Fix what is read of the image, and turn cut-outs of the image into local copies."""
        image = self.program.image
        whole = self.splits[image].layout.map
        reads = [step.need.intersect(whole) for step in self._steps if isinstance(step, _ReadImage)]
        read_box = hull(box for box in reads if not box.empty)
        done: list[Instruction] = []
        for step in self._steps:
            if isinstance(step, _ReadImage):
                transfer = Transfer(read_box, step.need, whole, (), (), read_box.intersect(step.need))
                done.append(Communicate(Redistribute(transfer, fill=step.fill), (image,), (step.name,), "input"))
            else:
                done.append(step)
        return tuple(done), read_box


def draws_numbers(op: Operator) -> bool:
    """Whether the operator takes numbers from a generator; attention does only where it drops something."""
    tags = getattr(op.target, "tags", ())
    if op.text == "aten.scaled_dot_product_attention.default":
        return bool(op.args[4] if len(op.args) > 4 else op.kwargs.get("dropout_p", 0.0))
    return torch.Tag.nondeterministic_seeded in tags


def bound(op: Operator) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return (function, inputs): the operator's call as a function of the values it takes, constants bound."""
    names = tuple(dict.fromkeys(op.inputs))

    def call(*tensors: Any) -> Any:
        values = dict(zip(names, tensors, strict=True))
        return op.target(*substitute(op.args, values), **{k: substitute(v, values) for k, v in op.kwargs.items()})

    return call, names


def lower_replicated(lowering: Lowering, op: Operator) -> None:
    """No map left: every rank of the stage computes the same, on the same values."""
    if draws_numbers(op) and lowering.grid != (1, 1):
        lowering.refuse(
            op, "draws random numbers, which ranks would draw differently", "dropout, bernoulli, rand, randn, or none"
        )
    if lowering.replicas > 1 and op.text.startswith("aten._native_batch_norm_legit"):
        lowering.refuse(
            op, "normalises features without space, which plan.sync_batch_norm does not", "sync_batch_norm=False"
        )
    if op.text == "aten._native_batch_norm_legit_functional.default":
        function, inputs = batch_norm_on_features(lowering.program, op)
    elif op.text == "aten._native_batch_norm_legit.no_stats":
        function, inputs = batch_norm_alone(op)
    elif op.text in ("aten.view.default", "aten._unsafe_view.default"):
        # Values may lie otherwise in memory here than where the model was captured, attention's for one.
        function, inputs = bound(replace(op, target=torch.ops.aten.reshape.default))
    else:
        function, inputs = bound(op)
    lowering.compute(function, inputs, op.outputs)


def renamed(op: Operator, names: dict[str, str]) -> Operator:
    """Return the operator with some of its values replaced by others."""

    def swap(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return Ref(names.get(argument.name, argument.name))
        if isinstance(argument, (list, tuple)):
            return type(argument)(swap(item) for item in argument)
        return argument

    return replace(op, args=swap(op.args), kwargs={key: swap(item) for key, item in op.kwargs.items()})


def _itself(tensor: Any) -> Any:
    return torch.ops.aten.alias.default(tensor)  # keeps strides, which a view makes up anew for a batch of one
