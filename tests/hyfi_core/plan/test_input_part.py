from hyfi_core.plan.box import Box
from hyfi_core.plan.input_part import InputPart

PART = InputPart(Box(1, 4, 2, 9), 3, 7)


def test_a_part_comes_back_from_json() -> None:
    assert PART.to_json() == [1, 4, 2, 9, 3, 7]
    assert InputPart.from_json(PART.to_json()) == PART


def test_microbatches_are_counted_from_the_first_sample() -> None:
    assert PART.microbatch(1, 2) == InputPart(PART.box, 4, 6)


def test_a_part_covers_what_is_within_its_box_and_samples() -> None:
    assert PART.covers(PART.box, 3, 7) and PART.covers(Box(2, 3, 3, 4), 4, 5)
    assert not PART.covers(PART.box, 2, 7) and not PART.covers(PART.box, 3, 8)
    assert not PART.covers(Box(0, 4, 2, 9), 3, 7)
    assert [position for position in range(10) if PART.has_sample(position)] == [3, 4, 5, 6]
