from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pathology import claims
from pathology.claims import Claim, ClaimLostError, is_held, remove_ended
from tests.conftest import ROOT
from tests.patience import PATIENCE_S


def backdate(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_one_holds_until_it_gives_back(tmp_path: Path) -> None:
    with Claim.take(tmp_path, "a.b") as held:  # type: ignore[union-attr]
        assert Claim.take(tmp_path, "a.b") is None and is_held(tmp_path, "a.b")
        other = Claim.take(tmp_path, "a")
        assert other is not None
        other.release()
        held.check()
    assert not is_held(tmp_path, "a.b") and not list(tmp_path.iterdir())


def test_a_silent_claim_of_another_machine_is_taken_over_once(tmp_path: Path) -> None:
    (tmp_path / "a.0").write_text("elsewhere/boot/1 77 123 0011")
    backdate(tmp_path / "a.0", claims.STALE_AFTER_S - 20)
    assert Claim.take(tmp_path, "a") is None
    backdate(tmp_path / "a.0", claims.STALE_AFTER_S + 20)
    won: list[Claim] = []
    barrier = threading.Barrier(8)

    def reclaim() -> None:
        barrier.wait()
        claim = Claim.take(tmp_path, "a")
        if claim is not None:
            won.append(claim)

    threads = [threading.Thread(target=reclaim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and is_held(tmp_path, "a")
    won[0].release()
    assert not list(tmp_path.iterdir())


def test_a_claim_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    code = "from pathlib import Path; from pathology.claims import Claim; "
    code += f"Claim.take(Path({str(tmp_path)!r}), 'a'); "
    holder = subprocess.Popen(
        [sys.executable, "-c", code + "print('held', flush=True); import time; time.sleep(60)"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline().strip() == "held"
    assert Claim.take(tmp_path, "a") is None
    holder.kill()
    holder.wait()
    assert not is_held(tmp_path, "a")
    remove_ended(tmp_path, "a")
    assert not list(tmp_path.iterdir())


def test_what_killed_runs_left_is_swept_and_the_living_stay(tmp_path: Path) -> None:
    for name in ("a.0", "a.2", "b.c.1"):
        (tmp_path / name).write_text("elsewhere/boot/1 77 123 0011")
        backdate(tmp_path / name, claims.STALE_AFTER_S + 20)
    (tmp_path / "d.0").write_text("elsewhere/boot/1 78 123 0012")
    with Claim.take(tmp_path, "e"):  # type: ignore[union-attr]
        claims.sweep(tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["d.0", "e.0"]


def test_whoever_was_silent_too_long_is_told(tmp_path: Path) -> None:
    slow = Claim.take(tmp_path, "a")
    assert slow is not None
    backdate(tmp_path / "a.0", claims.STALE_AFTER_S + 1)
    with Claim.take(tmp_path, "a") as fast:  # type: ignore[union-attr]
        with pytest.raises(ClaimLostError):
            slow.check()
        slow.release()
        fast.check()
        assert Claim.take(tmp_path, "a") is None


def test_an_old_list_of_the_folder_hides_no_takeover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS clients keep lists of folders: the file of whoever took over is missing there for a while."""
    slow = Claim.take(tmp_path, "a")
    assert slow is not None
    slow.check()
    backdate(tmp_path / "a.0", claims.STALE_AFTER_S + 1)
    fast = Claim.take(tmp_path, "a")
    assert fast is not None
    monkeypatch.setattr(claims, "_numbers", lambda folder, name: [0])
    with pytest.raises(ClaimLostError):
        slow.check()
    fast.check()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.0", "a.1"]


def test_the_heartbeat_keeps_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT_S", 0.02)
    with Claim.take(tmp_path, "a"):  # type: ignore[union-attr]
        backdate(tmp_path / "a.0", claims.STALE_AFTER_S + 1)
        deadline = time.monotonic() + PATIENCE_S
        while not is_held(tmp_path, "a"):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_never_two_at_a_time_while_holders_die(tmp_path: Path) -> None:
    rng = random.Random(0)
    lock, inside, most, turns, last_s = threading.Lock(), 0, 0, 0, time.monotonic() + PATIENCE_S

    def work() -> None:
        nonlocal inside, most, turns
        while turns < 40 and time.monotonic() < last_s:
            claim = Claim.take(tmp_path, "a")
            if claim is None:
                time.sleep(0.001)
                continue
            with lock:
                inside, turns = inside + 1, turns + 1
                most = max(most, inside)
            time.sleep(rng.random() * 0.002)
            with lock:
                inside -= 1
            if rng.random() < 0.4:  # dies: silent for ever, the file stays
                claim._stop.set()
                backdate(claim._path, 1000)
            else:
                claim.release()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and turns >= 40
