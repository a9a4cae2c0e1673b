"""Cuts hold the pixels of their box: views within the map, padded outside, empty with the right sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hyfi_core.ops.cut import at, copy_box, cut, in_words
from hyfi_core.plan.box import Box
from tests.fake_gpu import FakeGpu

MAP = Box(0, 6, 0, 8)
VALUES = torch.arange(2 * 3 * 6 * 8.0).view(2, 3, 6, 8)


FAR = [Box(-3, -1, 2, 7), Box(1, 4, -2, 0), Box(6, 8, 8, 9), Box(-4, -2, -4, -1)]  # of padding alone


@pytest.mark.parametrize("need", [Box(1, 4, 2, 7), Box(-2, 3, 5, 11), Box(0, 6, -1, 9), *FAR])
def test_a_cut_is_the_box_of_the_padded_map(need: Box) -> None:
    padded = F.pad(VALUES, (4, 4, 4, 4), value=-1.0)
    expected = padded[:, :, need.y0 + 4 : need.y1 + 4, need.x0 + 4 : need.x1 + 4]
    assert cut(MAP, need, MAP, (2, 3), -1.0)(VALUES).equal(expected)
    turned = cut(MAP, need, MAP, (3, 2), -1.0)(VALUES.transpose(2, 3))
    assert turned.equal(expected.transpose(2, 3))


def test_a_cut_within_the_map_is_a_view() -> None:
    part = cut(Box(2, 6, 0, 8), Box(3, 5, 1, 4), MAP, (2, 3), 0.0)(VALUES[:, :, 2:])
    assert part.equal(VALUES[:, :, 3:5, 1:4])
    assert part.untyped_storage().data_ptr() == VALUES.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("need", "sides"), [(Box(2, 2, 0, 5), (0, 5)), (Box(1, 4, 3, 3), (3, 0)), (Box(9, 9, 9, 9), (0, 0))]
)
def test_an_empty_cut_has_the_sizes_of_its_box(need: Box, sides: tuple[int, int]) -> None:
    assert cut(MAP, need, MAP, (2, 3), 0.0)(VALUES).shape == (2, 3, *sides)
    assert cut(MAP, need, MAP, (3, 2), 0.0)(VALUES.transpose(2, 3)).shape == (2, 3, *sides[::-1])


KINDS = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool)
ORDERS = st.sampled_from([torch.contiguous_format, torch.channels_last])


def random_bits(shape: tuple[int, ...], kind: torch.dtype, order: torch.memory_format, seed: int) -> torch.Tensor:
    """A map of any bits, NaN of all kinds among them."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * kind.itemsize
    high = 2 if kind == torch.bool else 256
    bits = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return bits.view(kind).view(shape).contiguous(memory_format=order)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


@given(
    st.sampled_from(KINDS),
    st.tuples(ORDERS, ORDERS),
    st.tuples(st.integers(1, 2), st.integers(1, 20), st.integers(0, 6), st.integers(0, 20)),
    st.tuples(*[st.integers(0, 5)] * 4),
)
def test_a_box_is_copied_bit_by_bit_in_words_of_any_size(
    kind: torch.dtype,
    orders: tuple[torch.memory_format, torch.memory_format],
    shape: tuple[int, int, int, int],
    around: tuple[int, int, int, int],
) -> None:
    count, channels, height, width = shape
    above, below, left, right = around
    outer = (count, channels, height + above + below, width + left + right)
    box, whole = Box(above, above + height, left, left + width), Box(0, outer[2], 0, outer[3])
    small, large = random_bits(shape, kind, orders[0], 0), random_bits(outer, kind, orders[1], 1)
    for target, source in ((at(large, box, whole), small), (small.clone(), at(large, box, whole))):
        base = large if target._base is not None else target
        wanted, found = base.clone(), base.clone()
        goal = (at(wanted, box, whole), at(found, box, whole)) if base is large else (wanted, found)
        goal[0].copy_(source)
        words = in_words(goal[1], source)
        if words is None:
            goal[1].copy_(source)
        else:
            assert words[0].element_size() > kind.itemsize and words[0].nbytes == source.nbytes
            words[0].copy_(words[1])
        assert torch.equal(bits_of(found), bits_of(wanted))


@pytest.mark.parametrize(
    ("channels", "left", "size"),
    [(8, 1, 16), (64, 3, 16), (4, 1, 8), (12, 1, 8), (2, 1, 4), (6, 1, 4), (3, 1, None), (3, 2, 4), (1, 1, None)],
)
def test_words_are_as_large_as_rows_and_places_allow(channels: int, left: int, size: int | None) -> None:
    """Pixels of a map in bfloat16, channels-last, with another number of them around in each row."""
    large = torch.zeros(1, channels, 6, 16 + 2 * left, dtype=torch.bfloat16).contiguous(
        memory_format=torch.channels_last
    )
    small = torch.zeros(1, channels, 6, 16, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    words = in_words(large[..., left:-left], small)
    assert (None if words is None else words[0].element_size()) == size
    assert in_words(small, small.clone()) is None  # no gaps: memory is copied as a whole
    assert in_words(small, small.float()) is None
    assert channels == 1 or in_words(small, small.contiguous()) is None


def test_some_channels_of_a_channels_last_map_are_not_rows() -> None:
    """Between the pixels of a row there are other channels, also if there are two pixels."""
    few, many = (torch.zeros(1, count, 3, 2, dtype=torch.bfloat16) for count in (8, 24))
    few, many = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (few, many))
    assert in_words(many[:, :8], few) is None and in_words(few, many[:, 8:16]) is None
    # One pixel of each row has no neighbour.
    assert in_words(many[:, :8, :, :1], few[..., :1]) is not None


@pytest.mark.parametrize("of_target", [True, False])
@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view])
def test_views_that_are_changed_when_they_are_read_are_not_copied_in_words(lazy: Any, of_target: bool) -> None:
    target, source = (torch.zeros(1, 2, 4, 8 + gap, dtype=torch.complex64)[..., :8] for gap in (2, 4))
    assert in_words(target, source) is not None
    assert in_words(*((lazy(target), source) if of_target else (target, lazy(source)))) is None


def test_on_a_gpu_boxes_are_copied_in_words_and_elsewhere_as_they_are() -> None:
    def kinds_copied(device: str) -> set[torch.dtype]:
        seen = set()

        class Copies(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(
                self, func: object, types: object, args: tuple = (), kwargs: object = None
            ) -> object:
                if func is torch.ops.aten.copy_.default:
                    seen.add(args[0].dtype)
                return func(*args, **(kwargs or {}))  # type: ignore[operator]

        with FakeGpu():
            large = torch.zeros(1, 8, 6, 8, dtype=torch.bfloat16, device=device).to(memory_format=torch.channels_last)
            small = torch.ones(1, 8, 6, 6, dtype=torch.bfloat16, device=device).to(memory_format=torch.channels_last)
            with Copies():
                copy_box(large[..., 1:7], small)
            assert float(large.cpu().float().sum()) == small.numel()
        return seen

    assert kinds_copied("cpu") == {torch.bfloat16}
    assert kinds_copied("cuda") == {torch.complex128}


@pytest.mark.parametrize("of_source", [True, False])
def test_gradients_flow_through_a_box_that_is_copied_on_a_gpu(of_source: bool) -> None:
    """Words have none: what is differentiated is copied as it is."""
    with FakeGpu():
        small = torch.ones(1, 8, 6, 6, device="cuda").to(memory_format=torch.channels_last).requires_grad_(of_source)
        leaf = torch.zeros(1, 8, 6, 8, device="cuda").to(memory_format=torch.channels_last)
        leaf.requires_grad_(not of_source)
        large = leaf.clone()
        copy_box(large[..., 1:7], small)
        large.sum().backward()
        gradient = small.grad if of_source else leaf.grad
        assert gradient is not None
        assert float(gradient.cpu().sum()) == (small.numel() if of_source else large.numel() - small.numel())


@pytest.mark.cuda
@pytest.mark.parametrize("channels", [1, 3, 6, 12, 64])
@pytest.mark.parametrize("left", [0, 1, 3])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", KINDS)
def test_boxes_are_copied_bit_by_bit_on_a_gpu(
    kind: torch.dtype, order: torch.memory_format, left: int, channels: int
) -> None:
    large = random_bits((2, channels, 37, 40 + left + 2), kind, order, 0).cuda()
    small = random_bits((2, channels, 35, 40), kind, order, 1).cuda()
    wanted, found, back = large.clone(), large.clone(), small.clone()
    wanted[:, :, 1:36, left : left + 40].copy_(small)
    copy_box(found[:, :, 1:36, left : left + 40], small)
    copy_box(back, large[:, :, 1:36, left : left + 40])
    assert torch.equal(bits_of(found), bits_of(wanted))
    assert torch.equal(bits_of(back), bits_of(large[:, :, 1:36, left : left + 40]))
