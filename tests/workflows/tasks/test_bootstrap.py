from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workflows.evaluation.evaluate import EvaluationSet
from workflows.tasks.bootstrap import DRAWS, draw_cases, drawn_metrics, intervals
from workflows.tasks.cases import by_case, case_indices
from workflows.tasks.class_metrics import CALIBRATION_BINS, METRICS, log_odds, metrics_of_logits, ranks
from workflows.tasks.multiclass import Multiclass

TASK = Multiclass(("label",), ("no", "yes"), (1.0, 1.0))


def by_torchmetrics(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float | None]:
    """The metrics of :func:`metrics_of_logits`, by torchmetrics."""
    from torchmetrics.functional.classification import (
        binary_auroc,
        multiclass_calibration_error,
        multiclass_cohen_kappa,
        multiclass_f1_score,
        multiclass_recall,
    )

    predicted, classes, present = logits.argmax(1), logits.shape[1], targets.unique()
    bins = multiclass_calibration_error(logits.softmax(1), targets, classes, n_bins=CALIBRATION_BINS)
    found = {"accuracy": float((predicted == targets).double().mean()), "calibration_error": float(bins)}
    if len(present) == 1:
        return dict.fromkeys(METRICS) | found
    scores = [ranks(one).double() / len(one) for one in log_odds(logits).T]  # outside 0 to 1 a sigmoid is applied
    areas = [binary_auroc(scores[c], (targets == c).long()) for c in ([1] if classes == 2 else present.tolist())]
    f1 = multiclass_f1_score(predicted, targets, classes, average=None)
    recall = multiclass_recall(predicted, targets, classes, average=None)
    return found | {
        "auroc": float(torch.stack(areas).double().mean()),
        "balanced_accuracy": float(recall[present].mean()),
        "f1": float(f1[1] if classes == 2 else f1[present].mean()),
        "quadratic_kappa": float(multiclass_cohen_kappa(predicted, targets, classes, weights="quadratic")),
    }


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 4), st.integers(2, 20), st.integers(0, 10**6), st.sampled_from([1, 4]))
def test_all_draws_at_once_are_torchmetrics_on_each_draw(classes, n, seed, levels):
    torch.manual_seed(seed)
    logits = (torch.randn(n, classes, dtype=torch.float64) * levels).round() / levels
    targets, losses = torch.randint(0, classes, (n,)), torch.rand(n, dtype=torch.float64)
    counts = draw_cases(n, draws=3, seed=seed)
    found = drawn_metrics(logits, targets, losses, counts)
    for draw, row in enumerate(counts):
        drawn = torch.arange(n).repeat_interleave(row.long())
        expected = by_torchmetrics(logits[drawn], targets[drawn])
        assert metrics_of_logits(logits[drawn], targets[drawn]) == {
            name: value if value is None else pytest.approx(value, abs=1e-5) for name, value in expected.items()
        }
        wanted = {**expected, "loss": float(losses[drawn].mean())}
        for name, value in wanted.items():
            here = float(found[name][draw])
            assert math.isnan(here) if value is None else here == pytest.approx(value, abs=1e-5), name


def test_draws_are_of_cases_and_always_the_same():
    counts = draw_cases(7)
    assert counts.shape == (DRAWS, 7) and bool((counts.sum(1) == 7).all())
    assert torch.equal(counts, draw_cases(7))
    assert not torch.equal(counts, draw_cases(7, seed=1))
    assert float(counts.mean()) == 1.0 and 0.8 < float(counts.var()) < 0.95  # 1 − 1/7


def test_an_interval_is_wide_for_few_cases_however_many_slides_they_have():
    """A hundred slides of four patients know no more than four patients."""
    torch.manual_seed(0)
    case_of, targets = torch.arange(100) % 4, torch.arange(100) % 2
    losses = torch.rand(4, dtype=torch.float64)[case_of]
    logits = torch.randn(100, 2)
    of_cases = intervals(logits, targets, losses, draw_cases(4)[:, case_of])["loss"]
    of_slides = intervals(logits, targets, losses, draw_cases(100))["loss"]
    assert of_cases[1] - of_cases[0] > 3 * (of_slides[1] - of_slides[0])


def test_an_interval_is_where_the_mean_of_many_lies():
    losses = torch.from_numpy(np.random.default_rng(3).normal(5.0, 2.0, 400))
    found = intervals(torch.zeros(400, 2), torch.arange(400) % 2, losses, draw_cases(400))["loss"]
    mean, error = float(losses.mean()), float(losses.std()) / 20
    assert found == pytest.approx([mean - 1.96 * error, mean + 1.96 * error], abs=0.2 * error)


def test_what_is_undefined_has_no_interval():
    logits, losses = torch.randn(4, 2), torch.rand(4)
    one_class = intervals(logits, torch.zeros(4, dtype=torch.long), losses, draw_cases(4))
    assert one_class["auroc"] is None and one_class["quadratic_kappa"] is None
    assert one_class["accuracy"] is not None and one_class["loss"] is not None
    nothing = dict.fromkeys(("loss", *METRICS))
    assert intervals(torch.full((4, 2), torch.nan), torch.tensor([0, 1, 0, 1]), losses, draw_cases(4)) == nothing
    assert intervals(logits[:1], torch.tensor([0]), losses[:1], draw_cases(1)) == nothing


def test_slides_speak_for_their_case():
    logits = torch.tensor([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    targets, names = torch.tensor([1, 0, 0, 0]), ["b", "a", "b", "c"]
    p = logits.softmax(1)
    mean = by_case(logits, targets, names, "mean")
    assert mean.of_slide.tolist() == case_indices(names).tolist() == [0, 1, 0, 2]
    assert torch.allclose(mean.logits.exp(), torch.stack([(p[0] + p[2]) / 2, p[1], p[3]]))
    assert mean.targets.tolist() == [1, 0, 0]  # a case with one such slide is such a case
    worst = by_case(logits, targets, names, "max")
    assert torch.allclose(worst.logits.exp(), torch.stack([p[0], p[1], p[3]]))
    grades = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 3.0]])
    assert by_case(grades, torch.tensor([1, 2]), ["a", "a"], "max").logits.argmax().item() == 2


@pytest.mark.parametrize("aggregate", ["mean", "max", "none"])
def test_an_evaluation_set_scores_by_slide_and_by_case(aggregate):
    logits = {0: [2.0, 0.0], 1: [0.0, 1.0], 2: [0.0, 3.0], 3: [1.0, 0.0], 4: [0.0, 0.5]}
    evaluation_set = EvaluationSet(None, (0, 1, 1, 0, 0), ("a", "b", "b", "c", "c"), TASK, aggregate)
    found = evaluation_set.metrics_of(logits)
    outputs, targets = torch.tensor(list(logits.values())), torch.tensor(evaluation_set.targets)
    assert {name: found[name] for name in METRICS} == metrics_of_logits(outputs, targets)
    assert found["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, targets)))
    assert found["slides"] == 5 and set(found["intervals"]) == {"loss", *METRICS}
    if aggregate == "none":
        assert found["case"] is None
    else:
        assert found["case"]["cases"] == 3
        assert found["case"]["accuracy"] == pytest.approx(1.0 if aggregate == "mean" else 2 / 3)
    assert evaluation_set.metrics_of(logits) == found
