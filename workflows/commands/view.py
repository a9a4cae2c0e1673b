"""``hyfi view``: slides, heatmaps and annotations in the browser, from a server of this machine alone."""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hyfi_core.errors import RequestError
from workflows import console
from workflows.exit_codes import DONE
from workflows.paths import require_folder, require_writable

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from pathology.view.gallery import Gallery

LOOPBACK = "127.0.0.1"
CACHE_BYTES = 384 * 2**20
"""For decoded pixels of all slides together."""
GRACE_S = 2
"""How long answers that are under way may take when the server ends."""


def run(
    paths: list[Path],
    port: int,
    browser: bool,
    annotations: Path | None,
    slide_mpp: float | None,
) -> int:
    """Serve a deep-zoom page about ``paths`` until somebody stops it; its address is the first line printed.

    Args:
        paths: stores, slides of stores, slide files, folders of slides, folders of predictions.
        port: of this machine; 0: one that is free.
        browser: whether to open the page.
        annotations: folder for what is drawn; default: ``annotations`` in a folder of predictions, else nowhere.
        slide_mpp: micrometres per pixel of files that do not say theirs.

    Returns:
        0 when the server ends by itself.

    Raises:
        RequestError: a path is nothing that can be shown, or the port is taken.
        KeyboardInterrupt: stopped on request.
    """
    from pathology.view.gallery import Gallery
    from pathology.view.scene import Scene
    from pathology.view.server import make_app, new_token
    from pathology.view.web_files import leaflet_folder

    leaflet_folder()
    if annotations is not None:
        _check_annotations(annotations, paths)
    gallery = Gallery.of(paths, annotations, slide_mpp)
    failed = gallery.try_all()
    _require_one(gallery, failed)
    with _listening(port) as listener:
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
    """Check that something can be shown.

    Raises:
        RequestError: nothing can.
    """
    from pathology.view.gallery import WHAT_WOULD_WORK

    if gallery.slides and len(failed) == len(gallery.slides):
        words = "; ".join(f"{gallery.slides[key].path}: {reason}" for key, reason in list(failed.items())[:3])
        raise RequestError(f"none of the slides can be shown ({words}); {WHAT_WOULD_WORK}")


def _check_annotations(folder: Path, paths: list[Path]) -> None:
    """Check where annotations are to go.

    Raises:
        RequestError: it is no folder, cannot be written, or slides lie there.
    """
    require_folder(folder, "--annotations")
    require_writable(folder)
    place = folder.resolve()
    for path in paths:
        given = path.resolve()
        holds_slides = given if given.is_dir() and not (given / "predictions.csv").exists() else None
        if (holds_slides and place.is_relative_to(holds_slides)) or (given.is_file() and place == given.parent):
            raise RequestError(f"--annotations {folder}: slides lie there ({path}); choose a folder apart from them")


def _listening(port: int) -> socket.socket:
    """Return a socket of this machine alone that connections may queue at.

    Raises:
        RequestError: the port is taken, or not for this user.
    """
    # asyncio sends at once (TCP_NODELAY) only where the protocol is named; else every tile waits 40 ms for a receipt.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name != "nt":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise RequestError(f"--port {port}: {why}; choose another, or leave --port out for one that is free") from error
    return listener


def _open_browser(address: str) -> None:
    """Open the page where there is a screen; a browser of the terminal would take the terminal."""
    import webbrowser

    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    try:
        webbrowser.open(address)
    except (webbrowser.Error, OSError) as error:
        console.warn(f"no browser could be started ({error}); open the address above")


def _serve(app: ASGIApp, listener: socket.socket) -> None:
    """Answer requests until a signal comes; uvicorn raises it again when all answers under way are given."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # addresses hold the token
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=GRACE_S,
    )
    uvicorn.Server(config).run(sockets=[listener])
