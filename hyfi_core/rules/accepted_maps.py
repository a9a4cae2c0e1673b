"""Which maps a rule accepts: wrappers that refuse any other by name, before the rule runs."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps

from hyfi_core.capture.program import Operator, refs_in
from hyfi_core.rules.builder import Builder, Rule
from hyfi_core.rules.calls import renamed


def one_map(rule: Rule) -> Rule:
    """Return a rule that refuses maps in arguments other than the first, for rules that do not expect them."""

    @wraps(rule)
    def checked(builder: Builder, op: Operator) -> None:
        for argument in (*op.args[1:], *op.kwargs.values()):
            if any(name in builder.splits for name in refs_in(argument)):
                builder.refuse(op, "takes a map as a weight", "a map as first argument only")
        rule(builder, op)

    return checked


def on_maps(rule: Rule) -> Rule:
    """Return a rule that refuses anything but one map ``(B, C, H, W)``, as the first argument."""
    rule = one_map(rule)

    @wraps(rule)
    def checked(builder: Builder, op: Operator) -> None:
        split = builder.split_of(op.args[0])
        if split is not None and (not split.plain or split.dims != (2, 3) or len(builder.shape(op.args[0].name)) != 4):
            shape = builder.shape(op.args[0].name)
            builder.refuse(
                op,
                f"takes {shape} whose height and width are dims {split.dims}",
                "(B, C, H, W), with height and width in dims (2, 3)",
            )
        rule(builder, op)

    return checked


def on_maps_or_flat(rule: Rule) -> Rule:
    """Return the rule of ``on_maps``, also for a flat map ``(B, C, H · W)``, which is then computed as a map."""
    rule = on_maps(rule)

    @wraps(rule)
    def checked(builder: Builder, op: Operator) -> None:
        name, output = op.args[0].name, op.outputs[0]
        split = builder.split_of(op.args[0])
        if split is None or split.dims != (2, 2) or split.leads != (1, 1) or output is None:
            rule(builder, op)
            return
        opened = builder.opened(builder.part(name, split.owned))
        result = builder.fresh(output, builder.shape(opened))
        rule(builder, replace(renamed(op, {name: opened}), outputs=(result, *op.outputs[1:])))
        shape = split.owned.local_shape(builder.shape(output), builder.rank)
        part = builder.part(result, builder.splits[opened])
        builder.compute(lambda tensor: tensor.reshape(shape).clone(), (part,), (output,), split.owned)

    return checked
