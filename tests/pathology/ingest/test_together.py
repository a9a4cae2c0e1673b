"""Slides dealt to ranks at ingest: each once, one manifest, a failing slide alone, stopped and continued."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data.store.manifest import load_manifest
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from pathology.ingest import together
from pathology.ingest.archive import IngestOptions, IngestReport, Request, compare_with_store, ingest
from pathology.ingest.together import ingest_together
from tests.pathology.tiffs import stained, write_slide
from tests.patience import PATIENCE_S


@pytest.fixture
def slides(tmp_path: Path) -> Path:
    """Seven slides, the third of which is cut off."""
    folder = tmp_path / "slides"
    folder.mkdir()
    for seed, name in enumerate("abcdefg"):
        path = write_slide(folder / f"{name}.tiff", stained(600, 700, seed), compression="jpeg")
        if name == "c":
            path.write_bytes(path.read_bytes()[:20_000])
    return folder


def request_of(slides: Path, store: Path) -> Request:
    return Request([slides], store, IngestOptions())


@pytest.fixture
def dealt(monkeypatch: pytest.MonkeyPatch) -> object:
    """Returns the reports of thread ranks that ingest together; they share one pool of decoding threads."""
    monkeypatch.setattr(together, "set_decode_threads", lambda count: None)

    def run(request: Request, ranks: int, stop_after: int | None = None) -> list[tuple[IngestReport, list[str]]]:
        def body(comm: Communicator) -> tuple[IngestReport, list[str]]:
            mine: list[str] = []
            plan = compare_with_store(request) if comm.rank == 0 else None
            comm.barrier()
            report = ingest_together(
                request,
                plan,
                comm,
                workers=1,
                finished=lambda outcome: mine.append(outcome.record.slide_id),
                stop_wanted=lambda: stop_after is not None and len(mine) >= stop_after,
            )
            return report, mine

        return run_ranks(ranks, body)

    return run


def test_each_slide_is_ingested_by_one_rank_as_one_process_does(slides: Path, tmp_path: Path, dealt) -> None:  # type: ignore[no-untyped-def]
    alone = ingest(request_of(slides, tmp_path / "alone"), workers=1)
    found = dealt(request_of(slides, tmp_path / "store"), 3)
    assert sorted(name for _, mine in found for name in mine) == list("abcdefg")
    for report, _ in found:
        assert [record.slide_id for record in report.done] == list("abdefg") and not report.interrupted
        assert [(record.slide_id, record.reason) for record in report.failed] == [("c", alone.failed[0].reason)]
    assert load_manifest(tmp_path / "store") == load_manifest(tmp_path / "alone")
    left = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in (tmp_path / "store").iterdir()} == left
    again = dealt(request_of(slides, tmp_path / "store"), 2)
    assert again[0][0].skipped == again[1][0].skipped == list("abdefg")
    assert [record.slide_id for record in again[0][0].failed] == ["c"]


def test_a_stopped_run_continues(slides: Path, tmp_path: Path, dealt) -> None:  # type: ignore[no-untyped-def]
    request = request_of(slides, tmp_path / "store")
    reports = [report for report, _ in dealt(request, 2, stop_after=1)]
    assert [report.interrupted for report in reports] == [True, True]
    assert len(load_manifest(tmp_path / "store")) == 2
    continued = dealt(request, 2)[0][0]
    assert not continued.interrupted and len(continued.done) + len(continued.skipped) == 6


def test_a_store_that_cannot_be_written_is_refused_on_all_ranks(slides: Path, tmp_path: Path, dealt) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot write to"):
        dealt(request_of(slides, tmp_path / "file" / "store"), 2)


@pytest.mark.mpi
@pytest.mark.soak
def test_ranks_of_mpiexec_share_an_archive(slides: Path, tmp_path: Path) -> None:
    mpiexec = Path(sys.executable).parent / "mpiexec"
    words = [mpiexec, "-n", "3", sys.executable, "-m", "workflows.cli", "ingest", slides, "--out", "store", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    told = json.loads(line)
    assert told["done"] == list("abdefg") and [one["slide_id"] for one in told["failed"]] == ["c"]
    assert done.stdout.count("6 done, 1 failed") == 1 and done.stderr.count("failed: ") == 1
    assert len(load_manifest(tmp_path / "store")) == 7
    refused = subprocess.run([*words, "--mpp", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert refused.returncode == 2 and refused.stderr.count("hyfi: store has slides") == 1
