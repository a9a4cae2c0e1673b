from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from data.files import sha256_of, upload_directory, write_atomically
from data.location import (
    _is_on_network_disk,
    create_exclusively,
    each,
    files_below,
    is_address,
    is_far,
    is_remote,
    location,
    opened,
    remove_tree,
    sizes_of,
    version_of,
    versions_in,
)
from data.object_path import ObjectPath
from hyfi_core.errors import RequestError
from tests.google_server import any_bucket, google, google_bucket
from tests.object_server import ObjectServer, bucket, server

__all__ = ["any_bucket", "bucket", "google", "google_bucket", "server"]


def both(tmp_path: Path, bucket: str) -> list[Path]:
    return [tmp_path, location(f"{bucket}/a")]


@pytest.mark.parametrize("given", ["s3://b/store/x.zarr", "s3:/b/store/x.zarr", Path("s3://b/store/x.zarr/")])
def test_an_address_is_a_path_with_parts(given: str | Path) -> None:
    path = location(given)
    assert isinstance(path, ObjectPath) and is_remote(path) and is_address(given)
    assert str(path) == "s3://b/store/x.zarr" == str(pickle.loads(pickle.dumps(path)))
    assert str(path.parent) == "s3://b/store" and path.name == "x.zarr" and path.key == "store/x.zarr"
    assert str(path / "c" / "0") == "s3://b/store/x.zarr/c/0" and (path / "c/0").relative_to(path).as_posix() == "c/0"
    assert path.absolute() == path.resolve() == location(path)


def test_local_paths_and_file_addresses_are_ordinary(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    found = location(f"file://{tmp_path}/a%20b")
    assert found == tmp_path / "a b" and type(found) is type(tmp_path) and found.is_dir()
    assert location("x/y") == Path("x/y") and not is_address("x/y")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("ftp://h/x", "is not known; use one of s3://"),
        ("s3://", "bucket or host is missing"),
        ("https://h/x?sig=1", "?"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(given: str, what: str) -> None:
    with pytest.raises(RequestError) as refused:
        location(given)
    assert what in str(refused.value)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.object_client.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"s3://b/x: .*pip install 'hyfi\[cloud\]'"):
        location("s3://b/x")


def test_nothing_opens_an_address_as_a_local_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = location("s3://b/x")
    for act in (lambda: Path.open(path, "w"), lambda: path.rename("y"), lambda: os.mkdir(path)):  # noqa: PTH102
        with pytest.raises(RequestError, match="s3://b/x: a local file is needed"):
            act()
    assert not list(tmp_path.iterdir())


def test_files_are_the_same_here_and_there(tmp_path: Path, any_bucket: str) -> None:
    for folder in both(tmp_path, any_bucket):
        assert not folder.joinpath("f.json").exists() and version_of(folder / "f.json") == ""
        write_atomically(folder / "f.json", b"0123456789")
        first = version_of(folder / "f.json")
        write_atomically(folder / "f.json", b"0123456780")
        assert version_of(folder / "f.json") not in ("", first)
        assert versions_in(folder, ".json") == {"f": version_of(folder / "f.json")}
        assert (folder / "f.json").exists() and (folder / "f.json").stat().st_size == 10
        assert len(sha256_of(folder / "f.json")) == 64
        with opened(folder / "f.json") as file:
            assert file.read(2, 3) == b"234" and file.read(8, 9) == b"80" and file.read(30, 9) == b""
            assert file.tail(4) == (b"6780", 10) and file.tail(40) == (b"0123456780", 10)
        assert create_exclusively(folder / "g", b"1") and not create_exclusively(folder / "g", b"2")
        assert (folder / "g").read_bytes() == b"1"
        found = sizes_of(folder, ["f.json", "g", "none"])
        assert (found["f.json"], found["g"]) == (10, 1) and isinstance(found["none"], FileNotFoundError)
        assert files_below(folder) == ["f.json", "g"] == sorted(path.name for path in folder.iterdir())
        assert [path.name for path in folder.glob("*.json")] == ["f.json"]
        (folder / "g").unlink()
        with pytest.raises(FileNotFoundError):
            (folder / "g").read_bytes()
    remove_tree(location(f"{any_bucket}/a"))
    assert files_below(location(any_bucket)) == []


def test_a_small_object_is_read_with_its_last_bytes(server: ObjectServer, bucket: str) -> None:
    content = os.urandom(40_000)
    for size, requests in ((1000, 1), (40_000, 3)):
        path = location(f"{bucket}/{size}")
        path.write_bytes(content[:size])
        before = len(server.requests)
        with opened(path) as file:
            assert file.tail(10) == (content[size - 10 : size], size)
            assert [bytes(file.read(at, 300)) for at in (0, 200, size - 100)] == [
                content[at : min(size, at + 300)] for at in (0, 200, size - 100)
            ]
        assert len(server.requests) - before == requests


def test_requests_run_side_by_side_in_order_and_may_be_nested(server: ObjectServer, bucket: str) -> None:
    folder = location(bucket)
    for number in range(12):
        (folder / str(number)).write_bytes(bytes([number]))
    names = [str(number) for number in range(12)]

    def read(name: str) -> list[bytes]:
        return each(lambda one: (folder / one).read_bytes(), [name, name], folder)

    assert each(read, names, folder) == [[bytes([number])] * 2 for number in range(12)]


@pytest.mark.parametrize("how", ["503", "reset", "short"])
def test_transient_errors_are_repeated(server: ObjectServer, bucket: str, how: str) -> None:
    path = location(bucket) / "x"
    path.write_bytes(b"pixels" * 1000)
    faults = iter([how, how])
    server.fault = lambda number, method, where: next(faults, "")
    assert path.read_range(6, 5000) == (b"pixels" * 1000)[6:5006]
    faults = iter([how, how])
    path.write_bytes(b"other")
    assert path.read_bytes() == b"other"


def test_errors_say_what_to_do(server: ObjectServer, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=f"there is no bucket 'nowhere' at {server.address}; create it"):
        location("s3://nowhere/x").read_bytes()
    with pytest.raises(OSError, match="there is no bucket 'nowhere'"):
        location("s3://nowhere/x").tree()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(RequestError, match=r"no credentials for .* set AWS_ACCESS_KEY_ID"):
        location(f"s3://{server.make_bucket()}/x").read_bytes()


def test_a_server_that_is_gone_is_an_error_after_some_attempts(
    monkeypatch: pytest.MonkeyPatch, server: ObjectServer
) -> None:
    monkeypatch.setattr("data.object_client._RETRIES", 2)
    path = location(f"s3://{server.make_bucket()}") / "x"
    server.close()
    with pytest.raises(OSError, match=r"the server fails or does not answer: .* after 2 retries"):
        path.read_bytes()


def test_a_forked_process_is_told_to_start_anew(monkeypatch: pytest.MonkeyPatch, bucket: str) -> None:
    path = location(bucket) / "x"
    path.write_bytes(b"x")
    monkeypatch.setattr("data.object_client.os.getpid", lambda: -1)
    with pytest.raises(RequestError, match="forked after its parent had used object storage"):
        path.read_bytes()


@pytest.mark.parametrize(
    ("path", "far"),
    [
        ("/", False),
        ("/data/x", True),
        ("/data", True),
        ("/database", False),
        ("/my disk/a", True),
        ("/data/f/x", False),
    ],
)
def test_network_disks_are_recognised_by_their_mount(monkeypatch: pytest.MonkeyPatch, path: str, far: bool) -> None:
    mounts = {"/": "ext4", "/data": "nfs4", "/my disk": "fuse.sshfs", "/data/f": "xfs"}
    monkeypatch.setattr("data.location._mounts", lambda: mounts)
    monkeypatch.setattr("data.location.os.path.realpath", lambda given: given)
    _is_on_network_disk.cache_clear()
    assert is_far(Path(path)) == far
    _is_on_network_disk.cache_clear()


def test_an_upload_shows_its_last_file_when_all_others_are_there(
    tmp_path: Path, server: ObjectServer, bucket: str
) -> None:
    final = location(bucket) / "s.zarr"
    (final / "old" / "0").write_bytes(b"old")
    (final / "zarr.json").write_bytes(b"old")
    for name in ("0/c/0", "0/zarr.json", "zarr.json", "journal"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    before = len(server.requests)
    upload_directory(tmp_path, final, without=("journal",))
    changes = [(one[0], one[1].partition("s.zarr/")[2]) for one in server.requests[before:] if one[0] != "GET"]
    # A deletion is a POST of names; the first is of the old zarr.json.
    assert changes[0] == ("POST", "") and changes[-1] == ("PUT", "zarr.json")
    assert [name for method, name in changes if method == "PUT"].count("zarr.json") == 1
    assert files_below(final) == ["0/c/0", "0/zarr.json", "zarr.json"]


def test_an_interrupted_upload_is_no_slide(tmp_path: Path, server: ObjectServer, bucket: str) -> None:
    final = location(bucket) / "s.zarr"
    (final / "zarr.json").write_bytes(b"of an older version")
    for name in ("a", "b", "zarr.json"):
        (tmp_path / name).write_text(name)
    original = ObjectPath.write_bytes

    def breaks(self: ObjectPath, data: bytes) -> int:
        if self.name == "b":
            raise OSError(5, "cut off", str(self))
        return original(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectPath, "write_bytes", breaks)
        with pytest.raises(OSError, match="cut off"):
            upload_directory(tmp_path, final)
    assert not final.exists() and files_below(final) == ["a"]
