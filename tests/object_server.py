"""A server of object storage on loopback (moto's S3), that counts requests and fails on demand."""

from __future__ import annotations

import itertools
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from data.location import files_below

pytest.importorskip("obstore", reason="object storage needs hyfi[cloud]")
pytest.importorskip("moto.server", reason="the server of the tests is moto's")

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

_numbers = itertools.count()

KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class _Silent(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as those of real servers

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class ObjectServer:
    """The server of one test.

    Attributes:
        address: Its endpoint.
        requests: (method, path, query, range) of every request.
        fault: Called with each request's number, method and path; returns "", "503", "reset" or "short".
        latency_s: Seconds that each request waits.
    """

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Silent)
        self._server.daemon_threads = True  # type: ignore[attr-defined]
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self.requests: list[tuple[str, str, str, str]] = []
        self.fault: Callable[[int, str, str], str] = lambda number, method, path: ""
        self.latency_s = 0.0
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _answer(self, environ: dict[str, Any], start: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path, environ.get("QUERY_STRING", ""), environ.get("HTTP_RANGE", "")))
        time.sleep(self.latency_s)
        how = self.fault(len(self.requests), method, path)
        if how == "503":
            start("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        if how == "reset":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        answer = list(self._app(environ, start))
        if how == "short":  # the connection ends in the middle of the answer
            answer = [b"".join(answer)[:-7]]
            environ["werkzeug.socket"].shutdown(socket.SHUT_RD)
        return answer

    def count(self, method: str, listing: bool = False) -> int:
        """Return the number of requests of a method, listings or others."""
        return sum(one[0] == method and ("list-type" in one[2]) == listing for one in self.requests)

    def make_bucket(self) -> str:
        """Create a bucket and return its name."""
        name = f"bucket-{next(_numbers)}-{time.time_ns()}"
        request = urllib.request.Request(f"{self.address}/{name}", method="PUT")
        urllib.request.urlopen(request).close()
        return name

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def copy_to(folder: Path, place: Path) -> Path:
    """Copy every file of a folder to a place on object storage, and return the place."""
    for name in files_below(folder):
        (place / name).write_bytes((folder / name).read_bytes())
    return place


@contextmanager
def serving() -> Iterator[ObjectServer]:
    """Context with a running server."""
    server = ObjectServer()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """A server whose endpoint and keys are in the environment."""
    with serving() as running:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": running.address}.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def bucket(server: ObjectServer) -> str:
    """The address of a new bucket."""
    return f"s3://{server.make_bucket()}"
