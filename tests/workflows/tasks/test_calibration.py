"""A temperature makes probabilities mean what they say, and changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hyfi_core.errors import RequestError
from hyfi_core.runtime.calls.attribution import Explanation
from hyfi_core.runtime.checkpoint import amend_model_json, load_checkpoint, read_model_json, save_checkpoint
from pathology.predict.ensemble import position_scores
from pathology.predict.members import Member, temperature_of
from tests.workflows.archive import make_config, make_store
from tests.workflows.runs import in_this_process, run_here
from workflows.commands.validate import EvaluationRequest, run
from workflows.evaluation.cohort_page import CohortSlide, write_cohort_page
from workflows.tasks.calibration import evaluate_temperature, fit_temperature
from workflows.tasks.multiclass import Multiclass
from workflows.training.metrics_log import read_metrics


def drawn(slides: int, temperature: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits that are ``temperature`` times too large, and classes drawn by the right ones."""
    generator = torch.Generator().manual_seed(seed)
    right = torch.randn(slides, 3, generator=generator, dtype=torch.float64) * 1.5
    labels = torch.multinomial(right.softmax(1), 1, generator=generator)[:, 0]
    return right * temperature, labels


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_the_temperature_of_drawn_slides_is_found(temperature: float) -> None:
    logits, labels = drawn(6000, temperature)
    found = fit_temperature(logits, labels)
    assert found is not None and found.temperature == pytest.approx(temperature, rel=0.06) and found.slides == 6000
    other = drawn(6000, temperature, seed=1)
    judged = evaluate_temperature(*other, found.temperature)
    before, after = judged.calibration_error
    assert before is not None and after is not None and after < 0.03
    assert temperature == 1.0 or (before > 3 * after and judged.loss[1] < judged.loss[0])
    assert torch.equal(other[0].argmax(1), (other[0] / found.temperature).argmax(1))


def test_the_least_cost_is_found_to_many_digits() -> None:
    logits, labels = drawn(50, 2.0)
    found = fit_temperature(logits, labels)
    assert found is not None

    def cost(temperature: float) -> float:
        loss = torch.nn.functional.cross_entropy(logits / temperature, labels, reduction="sum")
        return float(loss) + np.log(temperature) ** 2 / (2 * 0.5**2)

    near = [cost(found.temperature * (1 + change)) for change in (-1e-4, 0, 1e-4)]
    assert near[1] < min(near[0], near[2])


def test_few_slides_that_are_all_right_move_it_little() -> None:
    logits = torch.tensor([[4.0, 0.0], [0.0, 4.0], [3.0, 0.0]])
    found = fit_temperature(logits, torch.tensor([0, 1, 0]))
    assert found is not None and 0.7 < found.temperature < 1.0
    assert fit_temperature(torch.tensor([[float("nan"), 0.0]]), torch.tensor([0])) is None
    assert fit_temperature(torch.empty(0, 2), torch.empty(0, dtype=torch.int64)) is None


def test_prediction_divides_by_the_temperature_of_the_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", weights={"w": torch.ones(2)}, model={"step": 3})
    assert temperature_of(read_model_json(tmp_path / "c")) == 1.0
    amend_model_json(tmp_path / "c", {"class_names": ["a", "b"], "calibration": {"temperature": 2.5}})
    loaded = load_checkpoint(tmp_path / "c")
    assert loaded.model["step"] == 3 and torch.equal(loaded.weights["w"], torch.ones(2))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["model.json", "model.safetensors"]
    member = Member("c", torch.nn.Identity(), loaded.model)
    readout, logits = member.readout, np.array([2.5, 0.0])
    assert readout.values(logits)[0] == pytest.approx(1 / (1 + np.exp(-1)))
    assert readout.uncalibrated(logits)[0] > readout.values(logits)[0]
    maps = torch.randn(1, 2, 4, 5)
    found = Explanation(logits=torch.zeros(1, 2), contributions=maps, positions=maps)
    assert torch.allclose(position_scores(found, readout), (maps[0] / 2.5).softmax(0))


def test_the_page_shows_reliability_before_and_after(tmp_path: Path) -> None:
    logits, labels = drawn(80, 3.0)
    pages, task = {}, Multiclass(("label",), ("a", "b", "c"))
    for name, temperature in (("plain", 1.0), ("calibrated", 3.0)):
        after, before = (logits / temperature).softmax(1).tolist(), logits.softmax(1).tolist()
        slides = [
            CohortSlide(
                slide_id=f"s{k}",
                case_id="",
                status="done",
                prediction="abc"[int(np.argmax(after[k]))],
                values=tuple(after[k]),
                label="abc"[int(labels[k])],
                coverage=1.0,
                flags=(),
                uncalibrated=tuple(before[k]) if temperature != 1 else (),
            )
            for k in range(80)
        ]
        (tmp_path / name).mkdir()
        pages[name] = write_cohort_page(tmp_path / name, slides, task, task.readout(None), name).read_text()
    assert "before calibration" not in pages["plain"] and pages["plain"].count("<svg") == 4
    assert pages["calibrated"].count("<svg") == 5 and "Reliability before calibration" in pages["calibrated"]
    assert "calibration error before calibration" in pages["calibrated"]


def test_a_run_leaves_calibrated_checkpoints_and_validate_fits_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(tmp_path)
    with in_this_process(monkeypatch):
        assert run_here(make_config(tmp_path, store, run={"steps": 3})) == 0
        checkpoint = tmp_path / "run" / "checkpoints" / "best"
        noted = read_model_json(checkpoint)["calibration"]
        logged = next(r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "validation")
        assert noted == {**logged["calibration"], "split": "val"} and noted["slides"] == 4
        request = EvaluationRequest(checkpoint, store, split="val", calibrate=True, as_json=True)
        capsys.readouterr()
        assert run(request) == 0
    said = capsys.readouterr().out
    found = json.loads(said.splitlines()[-1])["calibration"]
    assert read_model_json(checkpoint)["calibration"]["temperature"] == pytest.approx(noted["temperature"], rel=1e-4)
    assert found["temperature"] == pytest.approx(noted["temperature"], rel=1e-4)
    assert "calibrated on val; on 4 slides here, temperature" in said
    with pytest.raises(RequestError, match="--calibrate --split test"):
        run(EvaluationRequest(checkpoint, store, calibrate=True))
