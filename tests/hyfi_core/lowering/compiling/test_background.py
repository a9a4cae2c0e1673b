"""Segments that child processes compile while steps run as they are."""

from __future__ import annotations

import copy
import os
import pickle
import pickletools
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.lowering.compiling import background, graph_job, known_jobs, segment_compiler
from hyfi_core.lowering.compiling.background import BackgroundBatch
from hyfi_core.lowering.compiling.graph_job import GraphJob, InputFacts
from hyfi_core.lowering.compiling.segment_compiler import why_not_compiled
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.calls.input_gradients import InputGradient

SHAPE = (2, 3, 12, 12)


class Blocks(nn.Module):
    """Four equal blocks: the first is compiled with the stem, the last with the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)]) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.stem(x))
        for first, second, third in self.blocks:
            y = F.relu(y + third(F.gelu(second(F.silu(first(y)) * 0.5)) + 1))
        return y.mean((2, 3))


class LaterBatch:
    """Stands for child processes: the results of two calls come at the second question, failures of one job too."""

    fails = False

    def __init__(self, jobs: Sequence[GraphJob]) -> None:
        self.children, self.began_s = 2, time.monotonic()
        self.left, self.asked = len(jobs), 0

    def finished(self) -> dict[int, str | None]:
        """Return nothing first, then all jobs."""
        self.asked += 1
        if self.asked == 1:
            return {}
        jobs, self.left = self.left, 0
        return {index: "no room on the disk" if self.fails else None for index in range(jobs)}


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> type[LaterBatch]:
    """Let compilation in the background take two steps, without writing code."""
    monkeypatch.setattr(graph_job, "BACKEND", "aot_eager")
    monkeypatch.setattr(segment_compiler, "_CODE", {})
    monkeypatch.setattr(segment_compiler, "cached_on_disk", lambda: True)
    monkeypatch.setattr(segment_compiler, "BackgroundBatch", LaterBatch)
    monkeypatch.setattr("hyfi_core.runtime.parallelize.why_not_compiled", lambda device: None)
    monkeypatch.setattr(LaterBatch, "fails", False)
    return LaterBatch


class Normalised(nn.Module):
    """Equal blocks with group norms, whose means over ranks hold the shares of the ranks: a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)]) for _ in "123")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x)
        for convolution, norm in self.blocks:
            y = F.relu(norm(convolution(y)) + y * 0.5)
        return y.mean((2, 3))


def _engine(
    compile: Any, behind: bool = True, kind: type[nn.Module] = Blocks
) -> tuple[hyfi_core.Engine, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model, images, labels = kind().double(), torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 2])
    engine = hyfi_core.parallelize(
        copy.deepcopy(model),
        SHAPE,
        ParallelPlan(((1, 1),)),
        AloneCommunicator(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        verify=False,
        compile=compile,
    )
    if behind and engine.segments is not None:
        engine.segments.work_in_background()
    return engine, images, labels


def test_steps_run_as_they_are_until_code_is_ready(later: type[LaterBatch]) -> None:
    (plain, images, labels), (engine, *_) = _engine("off"), _engine("on")
    compiler = engine.segments
    assert compiler is not None
    seen = []
    for _ in range(5):
        wanted, loss = plain.train_step(images, labels), engine.train_step(images, labels)
        assert loss == pytest.approx(wanted, rel=1e-12)
        seen.append((compiler.segments > 0, compiler.news()))
    assert [compiled for compiled, _ in seen] == [False, False, False, True, True]
    first, second, third, fourth, fifth = (news for _, news in seen)
    assert first is None and third is None and fifth is None
    assert second is not None and second.startswith("compiling 4 segments of the model (3 different) in the background")
    assert fourth is not None and fourth.startswith("compiled 4 segments (3 compiled anew) of the model in ")
    assert torch.allclose(engine.predict(images), plain.predict(images), atol=1e-12)
    state, wanted_state = engine.gather_state_dict(), plain.gather_state_dict()
    assert state is not None and wanted_state is not None
    assert all(torch.allclose(state[name], value, atol=1e-12) for name, value in wanted_state.items())


@pytest.mark.parametrize("behind", [False, True])
def test_gradients_of_the_image_run_as_they_are(later: type[LaterBatch], behind: bool) -> None:
    """They have a backward for each output, and that of compiled code runs once: it failed at the second output."""
    (plain, images, _), (engine, *_) = _engine("off"), _engine("on", behind)
    assert engine.segments is not None
    for _ in range(4):
        found: list[InputGradient] = []
        wanted: list[InputGradient] = []
        logits = engine.input_gradients(images, found.append)
        assert torch.allclose(logits, plain.input_gradients(images, wanted.append), atol=1e-6)
        assert len(found) == len(wanted) == logits.shape[1] > 1
        assert all(torch.allclose(a.values, b.values, atol=1e-12) for a, b in zip(found, wanted, strict=True))
        assert torch.allclose(engine.predict(images), plain.predict(images), atol=1e-12)
        assert torch.allclose(engine.explain(images)[1], plain.explain(images)[1], atol=1e-6)
    assert engine.segments.segments > 0  # those of predictions


def test_segments_that_hold_tensors_wait_for_children_and_share_code(later: type[LaterBatch]) -> None:
    (plain, images, labels), (engine, *_) = (_engine(how, kind=Normalised) for how in ("off", "on"))
    compiler = engine.segments
    assert compiler is not None
    compiled = []
    for _ in range(5):
        assert engine.train_step(images, labels) == pytest.approx(plain.train_step(images, labels), rel=1e-12)
        compiled.append((compiler.segments, compiler.compiled))
    assert compiled[:3] == [(0, 0)] * 3, "compiled by this process, which should compute"
    assert compiled[4][0] > compiled[4][1] > 0


def test_what_this_process_has_compiled_is_used_from_the_second_step(later: type[LaterBatch]) -> None:
    engine, images, labels = _engine("on", behind=False)
    engine.train_step(images, labels)
    assert engine.segments is not None and engine.segments.segments == 4
    engine, *_ = _engine("on")
    assert engine.segments is not None
    engine.train_step(images, labels)
    assert engine.segments.segments == 0
    engine.train_step(images, labels)
    assert engine.segments.segments == 4 and engine.segments.compiled == 0


def test_a_failure_of_a_child_leaves_segments_as_they_are(
    later: type[LaterBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaterBatch, "fails", True)
    engine, images, labels = _engine("on")
    with pytest.warns(UserWarning, match="uncompiled on this rank: no room on the disk"):
        for _ in range(4):
            engine.train_step(images, labels)
    assert engine.segments is not None
    assert engine.segments.left == {"no room on the disk": 4} and engine.segments.segments == 0


def test_a_child_that_cannot_be_started_leaves_segments_as_they_are(
    later: type[LaterBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(jobs: Sequence[GraphJob]) -> BackgroundBatch:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(segment_compiler, "BackgroundBatch", no_memory)
    engine, images, labels = _engine("on")
    engine.train_step(images, labels)
    with pytest.warns(UserWarning, match="could be started: OSError.*Cannot allocate memory"):
        engine.train_step(images, labels)
    assert engine.segments is not None and engine.segments.idle and sum(engine.segments.left.values()) == 4


def _job() -> GraphJob:
    graph = torch.fx.symbolic_trace(lambda x: (torch.ops.aten.silu.default(x), torch.ops.aten.exp.default(x)))
    facts = InputFacts.of(torch.empty(2, 3))
    return GraphJob(graph_job.pickle.dumps(graph), graph.code, (facts,), False)


def test_a_child_that_dies_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background.sys, "executable", "/bin/false")
    batch = BackgroundBatch([_job(), _job()])
    results: dict[int, str | None] = {}
    while batch.left:
        results |= batch.finished()
        time.sleep(0.01)
    assert results == dict.fromkeys((0, 1), "the process that compiles it ended with code 1")


def test_a_child_ends_with_its_batch() -> None:
    batch = BackgroundBatch([_job()])
    pid = batch._running[0]._process.pid
    batch.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_keys_of_the_cache_do_not_depend_on_what_was_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    first = types.ModuleType("imported_before_all_others")
    vars(first)["torch"] = torch
    monkeypatch.setattr(sys, "modules", {first.__name__: first, **sys.modules})
    with graph_job.same_keys():
        named = [text for _, text, _ in pickletools.genops(pickle.dumps(torch.channels_last)) if isinstance(text, str)]
        assert pickle.loads(pickle.dumps(torch.channels_last)) is torch.channels_last
    assert named == ["torch", "channels_last"]
    with pytest.raises(pickle.PicklingError, match=first.__name__):
        pickle.dumps(torch.channels_last)


@pytest.mark.soak  # writes code and compiles it
def test_a_child_fills_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = why_not_compiled(torch.device("cpu"))
    if reason is not None:
        pytest.skip(reason)
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    job = _job()
    assert not known_jobs.compiled_before(job)
    batch = BackgroundBatch([job])
    results: dict[int, str | None] = {}
    while batch.left:
        results |= batch.finished()
        time.sleep(0.05)
    assert results == {0: None}
    counters.clear()
    x = torch.randn(2, 3)
    silu, _ = job.compiled()(x)
    assert counters["inductor"]["fxgraph_cache_miss"] == 0 and counters["inductor"]["fxgraph_cache_hit"] > 0
    assert torch.allclose(silu, F.silu(x))
    known_jobs.mark(job)
    assert known_jobs.compiled_before(job)
