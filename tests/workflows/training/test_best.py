from __future__ import annotations

import random

import pytest

from workflows.training.best import best_step, early_stop_step_of, merit


def records(*values: float | None) -> dict[int, dict[str, float | None]]:
    return {3 * (place + 1): {"auroc": value, "loss": 1.0} for place, value in enumerate(values)}


@pytest.mark.parametrize(
    ("values", "patience", "last"),
    [
        ((0.71, 0.80, 0.79, 0.80, 0.78), 2, 12),
        ((0.71, 0.80, 0.79, 0.81, 0.78), 2, None),
        ((0.5, 0.4), 1, 6),
        ((None, 0.1, None), 2, None),
        ((None, None, None), 2, 9),
        ((0.9, 0.1, 0.1), None, None),
    ],
)
def test_the_run_ends_with_a_step_of_weights(values, patience, last) -> None:
    assert early_stop_step_of(records(*values), "auroc", patience) == last


def test_the_loss_decides_between_equals() -> None:
    falling = {step: {"auroc": 1.0, "loss": 1 / step} for step in range(1, 9)}
    assert early_stop_step_of(falling, "auroc", 1) is None
    assert best_step(falling, "auroc", falling) == 8
    assert merit({"loss": 0.1}, "loss") > merit({"loss": 0.2}, "loss") > merit({}, "loss")
    assert merit({"calibration_error": 0.1}, "calibration_error") > merit(
        {"calibration_error": 0.2}, "calibration_error"
    )


def test_the_answer_does_not_depend_on_when_records_come() -> None:
    """However many results a trainer has seen, once the step is known it stays, and so does the best up to it."""
    for seed in range(200):
        random.seed(seed)
        every = records(*(round(random.random(), 1) for _ in range(12)))
        last = early_stop_step_of(every, "auroc", 2)
        seen = [early_stop_step_of({s: every[s] for s in list(every)[:count]}, "auroc", 2) for count in range(1, 13)]
        assert {answer for answer in seen if answer is not None} == ({last} if last is not None else set())
        if last is not None:
            upto = [step for step in every if step <= last]
            best = best_step(every, "auroc", upto)
            assert upto.index(last) - upto.index(best) == 2
