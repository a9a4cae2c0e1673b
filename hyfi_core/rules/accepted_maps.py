"""Which maps a rule accepts: wrappers that refuse any other by name, before the rule runs.

A model may view its image as tiles and encode each of them. Tiles are a flat map in the batch dim: its positions are
tiles, in row-major order of the image, and each rank has those of its part::

    image (B, C, H, W)                 tiles (B · H/p · W/p, C, p, p)        dims (0, 0), map counts (B, 1)
    ┌───┬───┬───┐
    │ 0 │ 1 │ 2 │   rank 0: 0 1 3 4    what an operator does to each entry of a batch, it does to each rank's tiles:
    ├───┼───┼───┤   rank 1: 2 5        no halo, since a tile ends at its border, and no communication
    │ 3 │ 4 │ 5 │
    └───┴───┴───┘
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps

from hyfi_core.capture.program import Operator, refs_in
from hyfi_core.rules.builder import Builder, Rule
from hyfi_core.rules.calls import emit_on_part, renamed


def one_map(rule: Rule) -> Rule:
    """Return the rule with a check in front: it refuses operators with maps in arguments other than the first."""

    @wraps(rule)
    def checked(builder: Builder, op: Operator) -> None:
        maps = [name for name in op.inputs if name in builder.splits]
        # Counted by a sum, since the first argument may be a list of maps.
        if len(maps) > sum(name in builder.splits for name in refs_in(op.args[:1])):
            builder.refuse(op, "takes a map as a weight", "a map as first argument only")
        rule(builder, op)

    return checked


def on_tiles(builder: Builder, op: Operator) -> None:
    """An operator that computes each entry of a batch separately: called on this rank's tiles."""
    split = builder.splits[op.args[0].name].owned
    emit_on_part(builder, op, split, split, op)


ALL_TILES = "all tiles at once: each rank computes its own, and with plan.cells cell by cell"
"""What works instead of a loop over single tiles."""


def on_maps(rule: Rule, tiles: Rule = on_tiles) -> Rule:
    """Return a rule for one map ``(B, C, H, W)``, or tiles ``(N, C, h, w)``, as first argument; it refuses others.

    Args:
        rule: the rule to use for maps.
        tiles: the rule to use for tiles.
    """
    rule = one_map(rule)

    @wraps(rule)
    def checked(builder: Builder, op: Operator) -> None:
        """Lower by the rule for tiles or for maps; refuse any other first argument."""
        split, dim_count = builder.split_of(op.args[0]), len(builder.shape(op.args[0].name))
        if split is not None and split.in_batch and dim_count == 4:
            one_map(tiles)(builder, op)
            return
        if split is not None and (not split.has_own_dims or split.dims != (2, 3) or dim_count != 4):
            shape = builder.shape(op.args[0].name)
            builder.refuse(
                op,
                f"takes {shape} whose height and width are dims {split.dims}",
                "(B, C, H, W), with height and width in dims (2, 3)",
            )
        rule(builder, op)

    return checked


def on_maps_or_flat(rule: Rule, tiles: Rule = on_tiles) -> Rule:
    """Return the rule of ``on_maps``, also for a flat map ``(B, C, H · W)``, which is then computed as a map.

    Tiles may have any number of dims after their channels, or none after pooling: ``(N, C)``.
    """
    rule = on_maps(rule, tiles)

    @wraps(rule)
    def checked(builder: Builder, op: Operator) -> None:
        """Lower by the rule for tiles or for maps; a flat map is a map while the rule runs."""
        name, output = op.args[0].name, op.outputs[0]
        split = builder.split_of(op.args[0])
        if split is not None and split.in_batch:
            one_map(tiles)(builder, op)
            return
        if split is None or not split.is_flat_map or output is None:
            rule(builder, op)
            return
        # On each rank, height and width are separate dims until the rule has run.
        opened = builder.opened(builder.part(name, split.owned))
        result = builder.fresh(output, builder.shape(opened))
        rule(builder, replace(renamed(op, {name: opened}), outputs=(result, *op.outputs[1:])))
        shape = split.owned.local_shape(builder.shape(output), builder.rank)
        part = builder.part(result, builder.splits[opened])
        # Flatten the result again. A copy, so that the two values do not share memory.
        builder.compute(lambda tensor: tensor.reshape(shape).clone(), (part,), (output,), split.owned)

    return checked
