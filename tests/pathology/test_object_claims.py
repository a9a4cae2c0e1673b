from __future__ import annotations

import threading

import pytest

from data.location import location
from data.object_path import ObjectPath
from pathology import object_claims
from pathology.claims import Claim, ClaimLostError, is_held, remove_ended, sweep
from pathology.object_claims import ObjectClaim
from tests.google_server import any_bucket, google, google_bucket
from tests.object_server import bucket, server

__all__ = ["any_bucket", "bucket", "google", "google_bucket", "server"]

ELSEWHERE = b"elsewhere/boot/1 77 123 0011"


@pytest.fixture
def folder(any_bucket: str) -> ObjectPath:
    found = location(f"{any_bucket}/store/.claims")
    assert isinstance(found, ObjectPath)
    return found


def test_one_of_many_takes_a_claim_and_gives_it_back(folder: ObjectPath) -> None:
    won: list[object] = []
    barrier = threading.Barrier(6)

    def take() -> None:
        barrier.wait()
        claim = Claim.take(folder, "a.b")
        if claim is not None:
            won.append(claim)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (held,) = won
    assert isinstance(held, ObjectClaim) and is_held(folder, "a.b") and not is_held(folder, "a")
    held.check()
    held.release()
    assert not is_held(folder, "a.b") and not list(folder.glob("*"))


def test_a_claim_that_nobody_renews_is_taken_over_and_its_holder_sees_it(
    folder: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a").write_bytes(ELSEWHERE)
    assert Claim.take(folder, "a") is None and is_held(folder, "a")
    slow = ObjectClaim.take(folder, "b")
    assert slow is not None
    monkeypatch.setattr(object_claims, "has_ended", lambda token: False)
    monkeypatch.setattr(object_claims, "STALE_AFTER_S", -5.0)
    for name in "ab":
        fast = ObjectClaim.take(folder, name)
        assert fast is not None
        fast.check()
        if name == "b":
            with pytest.raises(ClaimLostError, match="taken over b"):
                slow.check()
            slow.release()
            fast.check()
        fast.release()


def test_a_claim_is_renewed_while_its_holder_works(folder: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_claims, "BEAT_S", 0.01)
    with ObjectClaim.take(folder, "a") as held:  # type: ignore[union-attr]
        before = (folder / "a").version()
        while (folder / "a").version() == before:
            held.check()
        held.check()
    assert not is_held(folder, "a")


def test_claims_of_ended_processes_are_swept(folder: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a").write_bytes(ELSEWHERE)
    (folder / "b").write_bytes(b"here 1 1 0022")
    monkeypatch.setattr(object_claims, "has_ended", lambda token: token.startswith("here"))
    sweep(folder)
    assert [path.name for path in folder.glob("*")] == ["a"]
    remove_ended(folder, "a")
    assert is_held(folder, "a")
