"""A web server of the files of a folder, with ranges, that waits before each answer; a process of its own.

    python -m workflows.benchmarks.remote.range_server FOLDER LATENCY_MS        prints its port

It stands for object storage. It needs little processor time, because it shares the machine with what is measured.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from urllib.parse import unquote

_MISSING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
_DATE = "Mon, 01 Jan 2024 00:00:00 GMT"


async def serve(folder: Path, latency_s: float) -> None:
    """Serve until the process is ended; the port is the first line printed."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after the other."""
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                # Only this connection waits, as latency does not limit bandwidth.
                await asyncio.sleep(latency_s)
                await _answer(folder, request.decode("latin-1"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    # Printed when the server listens: whoever reads the port may connect.
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _answer(folder: Path, request: str, writer: asyncio.StreamWriter) -> None:
    """Answer a request for a file, or for a range of its bytes."""
    method, target, *_ = request.split(" ", 2)
    path = folder / unquote(target).lstrip("/")
    if not path.is_file():
        writer.write(_MISSING)
        return
    size = path.stat().st_size
    start, end, byte_range = 0, size, _range(request)
    if byte_range is not None:
        first, _, last = byte_range.partition("-")
        # `bytes=5-9` has both ends; `bytes=-100` are the last hundred.
        start, end = (int(first), min(size, int(last) + 1)) if first else (max(0, size - int(last)), size)
    status = "200 OK" if byte_range is None else f"206 Partial Content\r\nContent-Range: bytes {start}-{end - 1}/{size}"
    head = f"HTTP/1.1 {status}\r\nContent-Length: {end - start}\r\nLast-Modified: {_DATE}\r\n\r\n"
    writer.write(head.encode())
    if method != "GET":
        return
    with path.open("rb") as file:
        # The kernel copies the bytes, which takes little time of the server's core.
        await asyncio.get_running_loop().sendfile(writer.transport, file, start, end - start)


def _range(request: str) -> str | None:
    for line in request.split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "range":
            return value.strip().removeprefix("bytes=")
    return None


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), float(sys.argv[2]) / 1e3))
