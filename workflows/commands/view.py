"""``hyfi view``: shows slides, heatmaps and annotations in the browser, with a server on loopback."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hyfi_core.errors import RequestError
from workflows import console
from workflows.exit_codes import DONE
from workflows.paths import require_folder, require_readable, require_writable

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from pathology.view.gallery import Gallery

LOOPBACK = "127.0.0.1"
CACHE_BYTES = 384 * 2**20
"""Size of the cache of decoded pixels, for all slides together."""
GRACE_S = 2
"""Time for requests in progress to finish when the server ends."""


def _require_server() -> None:
    """Raise ``RequestError`` if the packages of the web server are missing."""
    missing = [name for name in ("starlette", "uvicorn", "anyio") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"hyfi view needs {', '.join(missing)}: pip install 'hyfi[view]'")


def run(
    paths: list[Path],
    port: int,
    browser: bool,
    annotations: Path | None,
    slide_mpp: float | None,
) -> int:
    """Serve a deep-zoom page of ``paths`` until stopped; the first line printed is its address.

    Args:
        paths: Stores, slides of stores, slide files, folders of slides, folders of predictions.
        port: Port on loopback; 0: any free one.
        browser: Whether to open the page in a browser.
        annotations: Folder for annotations; default: ``annotations`` in a folder of predictions, otherwise annotations
            are not saved.
        slide_mpp: Microns per pixel of slide files that do not state them.

    Returns:
        0 when the server ends by itself.

    Raises:
        RequestError: A path cannot be shown, or the port cannot be used.
        KeyboardInterrupt: Stopped on request.
    """
    _require_server()
    from data.location import is_remote, location
    from pathology.view.gallery import Gallery
    from pathology.view.scene import Scene
    from pathology.view.server import make_app, new_token

    paths = [location(path) for path in paths]
    for path in paths:
        if not is_remote(path):
            require_readable(path, "give stores, slides of stores, slide files, or folders of slides or predictions")
    if annotations is not None:
        _check_annotations(annotations, paths)
    gallery = Gallery.of(paths, annotations, slide_mpp)
    failed = gallery.try_all()
    _require_one(gallery, failed)
    with _listen(port) as listener:
        token = new_token()
        address = f"http://{LOOPBACK}:{listener.getsockname()[1]}/{token}/"
        console.say(address)
        for key, reason in failed.items():
            console.warn(f"failed: {gallery.slides[key].path}: {reason}")
        console.warn(f"{len(gallery.slides) - len(failed)} of {len(gallery.slides)} slides; Ctrl-C ends the viewer")
        if browser:
            _open_browser(address)
        _serve(make_app(Scene(gallery, CACHE_BYTES), token), listener)
    return DONE


def _require_one(gallery: Gallery, failed: dict[str, str]) -> None:
    """Check that at least one slide can be shown.

    Raises:
        RequestError: None can.
    """
    from pathology.view.gallery import EXPECTED_PATHS

    if gallery.slides and len(failed) == len(gallery.slides):
        reasons = "; ".join(f"{gallery.slides[key].path}: {reason}" for key, reason in list(failed.items())[:3])
        raise RequestError(f"none of the slides can be shown ({reasons}); {EXPECTED_PATHS}")


def _check_annotations(folder: Path, paths: list[Path]) -> None:
    """Check the folder for annotations.

    Raises:
        RequestError: It is a file, cannot be written, or has slides in it.
    """
    from data.location import is_remote

    require_folder(folder, "--annotations")
    require_writable(folder)
    target = folder.resolve()
    for path in paths:
        if is_remote(path):
            continue
        shown_path = path.resolve()
        # A folder of predictions may hold annotations; it has no slides.
        slides_folder = shown_path if shown_path.is_dir() and not (shown_path / "predictions.csv").exists() else None
        if (slides_folder and target.is_relative_to(slides_folder)) or (
            shown_path.is_file() and target == shown_path.parent
        ):
            raise RequestError(f"--annotations {folder}: the folder has slides in it ({path}); choose another one")


def _listen(port: int) -> socket.socket:
    """Return a listening socket on loopback.

    Raises:
        RequestError: The port is in use, or not allowed for this user.
    """
    # asyncio sets TCP_NODELAY only if the protocol is given; without it each tile waits 40 ms for an acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name != "nt":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise RequestError(f"--port {port}: {why}; choose another, or leave --port out to use a free one") from error
    return listener


def _open_browser(address: str) -> None:
    """Open the page if there is a display; without one, a text browser would take over the terminal."""
    import webbrowser

    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    try:
        webbrowser.open(address)
    except (webbrowser.Error, OSError) as error:
        console.warn(f"no browser could be started ({error}); open the address above")


def _serve(app: ASGIApp, listener: socket.socket) -> None:
    """Serve requests until a signal; uvicorn finishes those in progress and raises the signal again."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # URLs contain the token
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=GRACE_S,
    )
    uvicorn.Server(config).run(sockets=[listener])
