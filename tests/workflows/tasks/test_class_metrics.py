from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workflows.tasks.class_metrics import METRICS, metrics_of_logits, metrics_of_probabilities
from workflows.tasks.multiclass import Multiclass
from workflows.tasks.ordinal.task import Ordinal


def area(scores, positive) -> float:
    """Share of (positive, negative) pairs in the right order, ties half: what AUROC means."""
    wins = [float(p > n) + 0.5 * float(p == n) for p in scores[positive] for n in scores[~positive]]
    return sum(wins) / len(wins)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(1, 25), st.integers(0, 10**6), st.sampled_from([1, 8]))
def test_metrics_mean_what_their_definitions_say(classes, n, seed, levels):
    torch.manual_seed(seed)
    probabilities = torch.softmax((torch.randn(n, classes) * levels).round() / levels, 1)
    targets = torch.randint(0, classes, (n,))
    found = metrics_of_probabilities(probabilities, targets)
    predicted, present = probabilities.argmax(1), targets.unique().tolist()
    assert found["accuracy"] == pytest.approx((predicted == targets).double().mean().item())
    if len(present) == 1:
        assert [found[name] for name in ("auroc", "balanced_accuracy", "f1", "quadratic_kappa")] == [None] * 4
        return
    hits = [((predicted == c) & (targets == c)).sum().item() for c in range(classes)]
    recalls = [hits[c] / (targets == c).sum().item() for c in present]
    f1 = [2 * hits[c] / ((predicted == c).sum() + (targets == c).sum()).clamp(min=1).item() for c in range(classes)]
    areas = [area(probabilities[:, c].double(), targets == c) for c in ([1] if classes == 2 else present)]
    assert found["balanced_accuracy"] == pytest.approx(sum(recalls) / len(recalls), abs=1e-6)
    assert found["f1"] == pytest.approx(f1[1] if classes == 2 else sum(f1[c] for c in present) / len(present), abs=1e-6)
    assert found["auroc"] == pytest.approx(sum(areas) / len(areas), abs=1e-6)
    square = [(p - t) ** 2 for p, t in zip(predicted.tolist(), targets.tolist(), strict=True)]
    chance = [(p - t) ** 2 for p in predicted.tolist() for t in targets.tolist()]
    assert found["quadratic_kappa"] == pytest.approx(1 - sum(square) / (sum(chance) / n), abs=1e-5)
    surest = probabilities.double().amax(1)
    of_bin = (torch.bucketize(surest.float(), torch.linspace(0, 1, 16), right=True) - 1).tolist()
    bins = [[i for i in range(n) if of_bin[i] == b] for b in range(16)]
    gaps = [abs(sum(float(predicted[i] == targets[i]) - float(surest[i]) for i in group)) for group in bins]
    assert found["calibration_error"] == pytest.approx(sum(gaps) / n, abs=1e-5)


def test_sure_logits_do_not_tie():
    logits = torch.tensor([[0.0, 60.0], [0.0, 61.0], [0.0, 62.0], [0.0, 63.0]])
    targets = torch.tensor([0, 0, 1, 1])
    assert metrics_of_logits(logits, targets)["auroc"] == 1.0
    assert metrics_of_logits(logits, 1 - targets)["auroc"] == 0.0


def test_logits_and_probabilities_agree():
    torch.manual_seed(0)
    logits, targets = torch.randn(40, 3, dtype=torch.float64), torch.randint(0, 3, (40,))
    assert metrics_of_logits(logits, targets) == metrics_of_probabilities(logits.softmax(1), targets)


def test_one_class_is_undefined_and_never_zero():
    found = metrics_of_logits(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    defined = {name: value for name, value in found.items() if value is not None}
    assert defined == {"accuracy": 0.5, "calibration_error": pytest.approx(0.231, abs=1e-3)}
    assert set(found) == set(METRICS)


@pytest.mark.parametrize("logits", [torch.empty(0, 2), torch.tensor([[float("nan"), 0.0]])])
def test_nothing_and_nonsense_are_undefined(logits):
    assert metrics_of_logits(logits, torch.zeros(len(logits), dtype=torch.long)) == dict.fromkeys(METRICS)


@pytest.mark.parametrize(
    ("shape", "targets"), [((3,), [0, 0, 0]), ((3, 1), [0, 0, 0]), ((3, 2), [0, 1]), ((3, 2), [0, 1, 2])]
)
def test_shapes_and_targets_are_checked(shape, targets):
    with pytest.raises(ValueError, match="targets"):
        metrics_of_logits(torch.zeros(shape), torch.tensor(targets))


def test_classes_that_no_evaluated_slide_has_are_named() -> None:
    """Metrics of a split without one of three classes are those of two; nothing said so."""
    for task, rest in (
        (Multiclass(("label",), ("a", "b", "c"), (1.0,) * 3), "class c: auroc, balanced accuracy and f1 leave it out"),
        (Ordinal(("label",), ("a", "b", "c"), (1.0,) * 3), "grade c: balanced accuracy leaves it out"),
    ):
        assert task.warnings([0, 1, 2], [0, 1, 1]) == [f"no validation slide has {rest}"]
        assert task.evaluation_warnings([0, 1, 2], "test") == task.warnings([0, 1, 2], []) == []
        (text,) = task.evaluation_warnings([1, 1], "test")
        assert text.startswith("all test slides are of one ")
