"""What travels from grid to grid: every rank gets its boxes, and the way back is the adjoint."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyfi_core.ops.boundary import BoundaryPiece, BoundaryTransfer, BoundaryValue, HandedOver, cut_out, pack, unpack
from hyfi_core.plan.box import Box
from hyfi_core.plan.layout import Layout

GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 3))
F64 = torch.float64


def split_value(
    name: str, side: tuple[int, int], first: Layout, second: Layout, gradient: bool = True
) -> BoundaryValue:
    return BoundaryValue(name, (2, 3, *side), F64, gradient, (2, 3), first.parts, second.parts)


def cut(value: BoundaryValue, whole: torch.Tensor, box: Box) -> torch.Tensor:
    rows, columns = box.slices() if not box.empty else (slice(0, box.height), slice(0, box.width))
    return whole[:, :, rows, columns]


def forward(boundary: BoundaryTransfer, held: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Carry values from every source to every target."""
    buffers: list[dict[int, torch.Tensor]] = [{} for _ in range(boundary.targets)]
    for source, tensors in enumerate(held):
        for target, pieces in boundary.outgoing(source).items():
            buffers[target][source] = pack(boundary, source, pieces, tensors, at_source=True)
    for target, inbox in enumerate(buffers):
        expected = boundary.incoming(target)
        assert inbox.keys() == expected.keys()
        for source, pieces in expected.items():
            assert inbox[source].nbytes == boundary.buffer(pieces, torch.device("cpu")).nbytes
    return [boundary.arrived(target, inbox) for target, inbox in enumerate(buffers)]


def backward(boundary: BoundaryTransfer, cotangents: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Carry cotangents back."""
    buffers: list[dict[int, torch.Tensor]] = [{} for _ in range(boundary.sources)]
    for target, tensors in enumerate(cotangents):
        for source, pieces in boundary.incoming(target, back=True).items():
            buffers[source][target] = pack(boundary, target, pieces, tensors, at_source=False)
    return [boundary.returned(source, inbox) for source, inbox in enumerate(buffers)]


def inner(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> float:
    return sum(float((x[n] * y[n]).sum()) for x, y in zip(a, b, strict=True) for n in x.keys() & y.keys())


@settings(max_examples=30, deadline=None)
@given(GRIDS, GRIDS, st.tuples(st.integers(1, 7), st.integers(1, 7)), st.booleans())
def test_the_way_back_is_the_adjoint(
    first: tuple[int, int], second: tuple[int, int], side: tuple[int, int], channels_last: bool
) -> None:
    """⟨F x, y⟩ = ⟨x, Fᵀ y⟩ for maps and replicated values together; maps of fewer pixels than ranks, too."""
    a, b = Layout.even(*side, first), Layout.even(*side, second)
    m, n = len(a.parts), len(b.parts)
    values = (
        split_value("map", side, a, b),
        BoundaryValue("features", (2, 5), F64, True),
        split_value("two", side, a, b),
    )
    boundary = BoundaryTransfer(values, m, n, channels_last)
    generator = torch.Generator().manual_seed(0)
    wholes = {v.name: torch.randn(v.shape, dtype=F64, generator=generator) for v in (values[0], values[2])}
    features = torch.randn(2, 5, dtype=F64, generator=generator)
    x = [{**{n: cut(values[0], w, part) for n, w in wholes.items()}, "features": features} for part in a.parts]
    there = forward(boundary, x)
    for part, tensors in zip(b.parts, there, strict=True):
        assert torch.equal(tensors["features"], features)
        for name, whole in wholes.items():
            assert torch.equal(tensors[name], cut(values[0], whole, part))
    y = [{name: torch.randn(t.shape, dtype=F64, generator=generator) for name, t in ts.items()} for ts in there]
    assert abs(inner(there, y) - inner(x, backward(boundary, y))) <= 1e-12 * max(1.0, abs(inner(there, y)))


def test_maps_in_channels_last_are_sent_and_received_as_they_are() -> None:
    """Without being rearranged at either end: a whole map is its own message."""
    whole = Layout.even(4, 6, (1, 1))
    value = split_value("map", (4, 6), whole, whole)
    boundary = BoundaryTransfer((value,), 1, 1, channels_last=True)
    held = torch.randn(value.shape, dtype=F64).contiguous(memory_format=torch.channels_last)
    (pieces,) = boundary.outgoing(0).values()
    assert pack(boundary, 0, pieces, {"map": held}, at_source=True).data_ptr() == held.data_ptr()
    (there,) = forward(boundary, [{"map": held}])
    assert torch.equal(there["map"], held) and there["map"].is_contiguous(memory_format=torch.channels_last)


def test_values_within_a_rank_are_handed_over_and_cotangents_copied() -> None:
    """Values are only read by the next stage; cotangents are overwritten, so they must be nobody else's."""
    whole = Layout.even(4, 6, (1, 1))
    values = split_value("map", (4, 6), whole, whole), split_value("skip", (4, 6), whole, whole)
    boundary = BoundaryTransfer(values, 1, 1, channels_last=True)
    held = {v.name: torch.randn(v.shape, dtype=F64).contiguous(memory_format=torch.channels_last) for v in values}
    (pieces,) = boundary.outgoing(0).values()
    there = boundary.arrived(0, {0: HandedOver(cut_out(boundary, 0, pieces, held, at_source=True), copied=False)})
    assert all(there[name].data_ptr() == tensor.data_ptr() for name, tensor in held.items())
    for copied in (False, True):
        # One tensor is the cotangent of both, as after a sum.
        parts = cut_out(boundary, 0, pieces, dict.fromkeys(held, held["map"]), at_source=False)
        handed = HandedOver([part.clone() for part in parts] if copied else parts, copied)
        back = boundary.returned(0, {0: handed})
        assert len({tensor.data_ptr() for tensor in (*back.values(), held["map"])}) == 3
        assert all(torch.equal(tensor, held["map"]) for tensor in back.values())
        assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in back.values())
        assert not copied or {t.data_ptr() for t in back.values()} == {t.data_ptr() for t in handed.tensors}


def test_a_rank_without_messages_has_its_empty_parts_on_the_device_of_the_others() -> None:
    """Its next collective sends from there: NCCL takes no tensor of the host."""
    one, two = Layout.even(1, 4, (1, 1)), Layout.even(1, 4, (2, 1))
    boundary = BoundaryTransfer((split_value("map", (1, 4), one, two),), 1, 2, device=torch.device("meta"))
    assert boundary.incoming(0) == {}
    empty = boundary.arrived(0, {})["map"]
    assert empty.is_meta and not empty.numel()
    (pieces,) = boundary.incoming(1, back=True).values()
    (zeros,) = cut_out(boundary, 1, pieces, {}, at_source=False)  # of a cotangent that was not computed
    assert zeros.is_meta


def test_what_carries_no_gradient_does_not_come_back_and_types_are_kept() -> None:
    side, a, b = (4, 6), Layout.even(4, 6, (1, 2)), Layout.even(4, 6, (2, 1))
    mask = BoundaryValue("mask", (2, 3, 4, 6), torch.bool, False, (2, 3), a.parts, b.parts)
    values = (mask, split_value("map", side, a, b))
    boundary = BoundaryTransfer(values, 2, 2)
    whole = torch.arange(144, dtype=F64).view(2, 3, 4, 6)
    held = [{"map": cut(values[1], whole, p), "mask": cut(values[1], whole, p) > 70} for p in a.parts]
    there = forward(boundary, held)
    assert all(torch.equal(t["mask"], cut(values[1], whole, p) > 70) for t, p in zip(there, b.parts, strict=True))
    back = backward(boundary, [{"map": t["map"]} for t in there])
    assert [set(tensors) for tensors in back] == [{"map"}, {"map"}]
    missing = backward(
        boundary, [{}, {}]
    )  # nobody computed a cotangent: zeros come, so that everybody's messages match
    assert all(not tensors["map"].any() for tensors in missing)


def test_pieces_of_a_message_begin_at_multiples_of_16_bytes_and_no_later() -> None:
    pieces = tuple(BoundaryPiece(BoundaryValue(str(n), (n,), torch.uint8, False), None) for n in (5, 16, 17, 3))
    buffer = BoundaryTransfer((), 1, 1).buffer(pieces, torch.device("cpu"))
    places = [piece.storage_offset() for piece in unpack(BoundaryTransfer((), 1, 1), buffer, pieces)]
    assert places == [0, 16, 32, 64] and buffer.nbytes == 67
