"""Slides dealt to groups of ranks: every slide once, and what one process would write."""

from __future__ import annotations

import copy
import csv
from collections import Counter
from pathlib import Path

import pytest

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from pathology.dealing import RanksPerSlide, SlideQueue, group_size
from pathology.predict.cohort import predict_slides
from pathology.predict.inputs import find_inputs
from pathology.predict.options import PredictOptions
from pathology.predict.table import PredictionReport
from tests.pathology.slides import Darkness, draw_slide, member_of, write_slide


@pytest.mark.parametrize(
    ("wanted", "ranks", "slides", "size"),
    [(None, 6, 9, 6), (2, 6, 1, 2), ("auto", 8, 100, 1), ("auto", 8, 3, 4), ("auto", 6, 0, 6), ("auto", 1, 5, 1)],
)
def test_how_many_ranks_share_a_slide(wanted: RanksPerSlide, ranks: int, slides: int, size: int) -> None:
    assert group_size(wanted, ranks, slides) == size


def test_groups_that_leave_ranks_over_are_refused() -> None:
    with pytest.raises(
        RequestError, match=r"--ranks-per-slide 4 with 6 ranks leaves ranks over; use one of 1, 2, 3, 6"
    ):
        group_size(4, 6, 9)


def test_every_slide_goes_to_one_group(tmp_path: Path) -> None:
    def body(comm: Communicator) -> tuple[list[int], int]:
        group = comm.split(comm.rank // 2, comm.rank)
        assert group is not None
        queue, mine, counted = SlideQueue(range(40), tmp_path, group, alone=False), [], 0
        while (index := queue.take()) is not None:
            mine.append(index)
            if group.rank == 0:
                queue.finish(index)
                counted += len(queue.newly_finished())
        return mine, counted

    found = run_ranks(6, body)
    assert [found[0][0], found[2][0], found[4][0]] == [found[1][0], found[3][0], found[5][0]]
    assert sorted(found[0][0] + found[2][0] + found[4][0]) == list(range(40))
    assert max(found[rank][1] for rank in (0, 2, 4)) == 40  # the last to finish has seen all others


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slides")
    for name in ("a", "b", "d"):
        write_slide(folder / f"{name}.tiff", draw_slide())
    (folder / "c.tiff").write_bytes(b"not a slide")
    return folder


def predicted(slides: Path, out: Path, ranks: int, ranks_per_slide: RanksPerSlide) -> list[PredictionReport]:
    member, options = member_of(Darkness()), PredictOptions(ranks_per_slide=ranks_per_slide)
    return run_ranks(
        ranks, lambda comm: predict_slides([copy.deepcopy(member)], find_inputs([slides]), out, comm, options)
    )


def rows_of(out: Path) -> dict[str, dict[str, str]]:
    with (out / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert max(Counter(row["slide_id"] for row in rows).values()) == 1
    return {row["slide_id"]: row for row in rows}


@pytest.fixture(scope="module")
def by_one(slides: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PredictionReport]:
    out = tmp_path_factory.mktemp("predictions") / "one"
    return out, predicted(slides, out, 1, None)[0]


@pytest.mark.parametrize(("ranks", "ranks_per_slide"), [(4, 2), (2, "auto")])
def test_groups_write_what_one_rank_writes(
    slides: Path, by_one: tuple[Path, PredictionReport], tmp_path: Path, ranks: int, ranks_per_slide: RanksPerSlide
) -> None:
    written, alone = by_one
    reports = predicted(slides, tmp_path / "dealt", ranks, ranks_per_slide)
    assert all(report == reports[0] for report in reports)
    assert [one.slide_id for one in reports[0].done] == [one.slide_id for one in alone.done] == ["a", "b", "d"]
    assert [one.reason for one in reports[0].failed] == [one.reason for one in alone.failed]
    one, dealt = rows_of(written), rows_of(tmp_path / "dealt")
    assert one.keys() == dealt.keys()
    for name, row in one.items():
        other = dealt[name]
        assert {k: v for k, v in row.items() if k[:2] != "p_"} == {k: v for k, v in other.items() if k[:2] != "p_"}
        for key in (key for key in row if key.startswith("p_") and row[key]):
            assert float(other[key]) == pytest.approx(float(row[key]), abs=2e-6)
    assert sorted(path.name for path in (tmp_path / "dealt").iterdir()) == sorted(
        path.name for path in written.iterdir()
    )
    again = predicted(slides, tmp_path / "dealt", 2, 1)[0]
    assert again.skipped == ("a", "b", "d") and [one.slide_id for one in again.failed] == ["c"]
