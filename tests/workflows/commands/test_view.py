"""`hyfi view` as a user starts and stops it."""

from __future__ import annotations

import http.client
import signal
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from tests.conftest import Hyfi
from tests.pathology.tiffs import stained, write_slide
from tests.patience import PATIENCE_S
from tests.workflows.commands.serving import serving
from workflows.commands import view


def status_of(address: str) -> int:
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_first_line_is_the_address_and_a_request_to_stop_ends_it(tmp_path: Path) -> None:
    write_slide(tmp_path / "a.tiff", stained(400, 500))
    (tmp_path / "b.svs").write_bytes(b"")
    with serving(tmp_path) as (process, address):
        base, token = address.rstrip("/").rsplit("/", 1)
        assert base.startswith("http://127.0.0.1:") and len(token) >= 32
        assert status_of(f"{address}slide/a/tile/0/0/0.jpg") == 200
        assert status_of(f"{base}/") == status_of(f"{base}/{token[1:]}/slides.json") == 403
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3 and out == ""
    assert "b.svs: the file is empty" in errors and "1 of 2 slides" in errors and "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tiff", "b.svs"]


def test_wrong_requests_say_what_was_given_and_what_would_work(tmp_path: Path, hyfi_here: Hyfi) -> None:
    (tmp_path / "notes.txt").write_text("no slide")
    done = hyfi_here("view", tmp_path / "notes.txt", "--no-browser")
    assert done.returncode == 2 and done.stdout == ""
    assert "notes.txt" in done.stderr and "give a store" in done.stderr
    slide = write_slide(tmp_path / "a.tiff", stained(300, 300))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RequestError, match=f"--port {port}: is in use; choose another"):
            view.run([slide], port, False, None, None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "b.svs").write_bytes(b"")
    with pytest.raises(RequestError, match=r"none of the slides can be shown .*the file is empty.* give a store"):
        view.run([tmp_path / "empty"], 0, False, None, None)


def test_annotations_never_go_where_slides_lie(tmp_path: Path) -> None:
    slide = write_slide(tmp_path / "a.tiff", stained(300, 300))
    for paths, folder in (([slide], tmp_path), ([tmp_path], tmp_path / "notes"), ([tmp_path], tmp_path)):
        with pytest.raises(RequestError, match=r"--annotations .*: the folder has slides in it"):
            view.run(paths, 0, False, folder, None)
    with pytest.raises(RequestError, match="is a file"):
        view.run([slide], 0, False, slide, None)
    assert list(tmp_path.iterdir()) == [slide]


def test_tiles_do_not_wait_for_receipts(tmp_path: Path) -> None:
    """With the small waits gone (Nagle's, of 40 ms a tile), an answer of few bytes takes less."""
    write_slide(tmp_path / "a.tiff", stained(300, 300))
    with serving(tmp_path / "a.tiff") as (_, address):
        parts = urllib.parse.urlsplit(address)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port)

        def seconds() -> float:
            start_s = time.perf_counter()
            connection.request("GET", f"{parts.path}static/page.js")
            assert connection.getresponse().read()
            return time.perf_counter() - start_s

        for _ in range(3):
            seconds()  # these are answered at once in any case
        assert any(seconds() < 0.03 for _ in range(300))  # one of them, however busy the machine is


def test_without_a_web_server_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"needs starlette, uvicorn, anyio: pip install 'hyfi\[view\]'"):
        view.run([tmp_path], 0, False, None, None)
