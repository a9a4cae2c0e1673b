"""The viewer's web server: pages, tiles and annotations of one gallery, protected by a token.

Every address starts with a random token; requests without it are refused with 403 before any other code runs. Slides
are identified by their key in the gallery, and static files by name in a fixed set, so no address is used as a path.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import anyio.to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from data.cores import usable_cores
from data.files import in_utf8, json_in_utf8
from data.store.slide_store import StoreError
from hyfi_core.errors import RequestError
from pathology.errors import SlideError
from pathology.view.annotations import LARGEST_BYTES, AnnotationError, ChangedMeanwhileError
from pathology.view.scene import NotInGalleryError, Scene
from pathology.view.web_files import (
    HEADERS,
    PAGE_HEADERS,
    knows_viewer,
    list_page,
    static_file,
    with_viewer,
)

PAGE_FILE, REPORT_FILE = "index.html", "report.html"
_CACHED = {**HEADERS, "Cache-Control": "private, max-age=86400, immutable"}  # addresses change at each start (token)
_FRESH = {**HEADERS, "Cache-Control": "no-store"}
_STATUS = {NotInGalleryError: 404, ChangedMeanwhileError: 412, AnnotationError: 422, RequestError: 409}


def new_token() -> str:
    """Return a random token of 192 bits."""
    return secrets.token_urlsafe(24)


class TokenGate:
    """ASGI middleware that refuses requests whose path does not start with the token.

    Args:
        app: Handles all other requests.
        token: The first part of the path.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        if scope["type"] == "http":
            first = scope["path"].lstrip("/").split("/", 1)[0]
            # In constant time: the duration of a comparison must not tell how many characters are right.
            if not secrets.compare_digest(first.encode("utf-8", "replace"), self._token):
                text = "This address needs the token that hyfi view printed when it started.\n"
                await PlainTextResponse(text, 403, headers=_FRESH)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def make_app(scene: Scene, token: str) -> ASGIApp:
    """Return the web application of a scene, which closes the gallery at the end.

    Args:
        scene: Content of the viewer.
        token: The first part of every path.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Each tile needs a few megabytes while it is made, and more threads than cores are not faster.
        anyio.to_thread.current_default_thread_limiter().total_tokens = usable_cores() + 2
        yield
        scene.gallery.close()

    mounted = Mount(f"/{token}", routes=_Handlers(scene).routes())
    handled: dict[Any, Any] = dict.fromkeys((HTTPException, SlideError, StoreError, RequestError, OSError), _error)
    # The gate is around the routes, so that requests for unknown addresses are refused before they are looked at.
    return TokenGate(Starlette(routes=[mounted], lifespan=lifespan, exception_handlers=handled), token)


def _error(request: Request, error: Exception) -> Response:
    """Return an exception as JSON with the status code of its type."""
    if isinstance(error, HTTPException):
        return _json({"error": error.detail}, status=error.status_code)
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 409)
    return _json({"error": str(error)}, status=status)


def _json(value: object, status: int = 200, **headers: str) -> Response:
    return Response(json_in_utf8(value), status, media_type="application/json", headers={**_FRESH, **headers})


async def _body(request: Request) -> bytes:
    """Return the body of a request; 413 if it is too large."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        # Checked while it arrives, because the length that the client states may be wrong.
        if len(data) > LARGEST_BYTES:
            raise HTTPException(413, f"annotations are limited to {LARGEST_BYTES} bytes")
    return bytes(data)


class _Handlers:
    """One method for each route; those that are not async run on threads."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._gallery = scene, scene.gallery

    def routes(self) -> list[Route]:
        """Return the routes, below the access token that every address begins with."""
        tile = "{zoom:int}/{row:int}/{column:int}"
        return [
            Route("/", self.first),
            Route("/view", self.viewer),
            Route("/static/{name}", self.static),
            Route("/cohort/{number:int}/", self.cohort),
            Route("/cohort/{number:int}/{slide_id}/report.html", self.report),
            Route("/open/{number:int}/{slide_id}", self.open),
            Route("/slides.json", self.slides),
            Route("/slide/{key}/about.json", self.about),
            Route("/slide/{key}/tile/" + tile + ".{kind}", self.tile),
            Route("/slide/{key}/layer/{layer}/" + tile + ".png", self.layer),
            Route("/slide/{key}/regions.json", self.regions),
            Route("/slide/{key}/annotations.json", self.annotations, methods=["GET"]),
            Route("/slide/{key}/annotations.json", self.save, methods=["PUT"]),
        ]

    def first(self, request: Request) -> Response:
        return RedirectResponse("cohort/0/" if self._gallery.predictions else "view", 302, headers=_FRESH)

    def viewer(self, request: Request) -> Response:
        page = static_file("viewer.html")
        assert page is not None, "viewer.html is in this package"
        return HTMLResponse(page[0], headers=PAGE_HEADERS)

    def static(self, request: Request) -> Response:
        file = static_file(request.path_params["name"])
        if file is None:
            raise HTTPException(404)
        return Response(file[0], media_type=file[1], headers=_CACHED)

    def cohort(self, request: Request) -> Response:
        """Return a prediction's page of slides, with links into the viewer; a plain list if no page supports links."""
        folder = self._folder(request)
        number = request.path_params["number"]
        path = folder / PAGE_FILE
        page = path.read_text(encoding="utf-8") if path.is_file() else ""
        if knows_viewer(page):
            return HTMLResponse(with_viewer(page, f"../../open/{number}/"), headers=_FRESH)
        slides = [slide for slide in self._gallery.slides.values() if slide.predictions == folder]
        links = [
            (f"../../view?slide={quote(slide.key, safe='')}", slide.slide_id, slide.prediction) for slide in slides
        ]
        return HTMLResponse(list_page(f"Predictions in {folder.name}", links), headers=_FRESH)

    def report(self, request: Request) -> Response:
        slide = self._slide_of(request)
        path = slide.predictions / slide.slide_id / REPORT_FILE
        if not path.is_file():
            raise HTTPException(404)
        return HTMLResponse(path.read_text(encoding="utf-8"), headers=_FRESH)

    def open(self, request: Request) -> Response:
        key = quote(self._slide_of(request).key, safe="")
        return RedirectResponse(f"../../view?slide={key}", 302, headers=_FRESH)

    def slides(self, request: Request) -> Response:
        tables = [folder.name for folder in self._gallery.predictions]
        return _json({"slides": self._scene.slides(), "tables": tables})

    def about(self, request: Request) -> Response:
        return _json(self._scene.about(request.path_params["key"]))

    def tile(self, request: Request) -> Response:
        at = request.path_params
        if at["kind"] not in ("png", "jpg"):
            raise HTTPException(404)
        data = self._scene.tile(at["key"], (at["zoom"], at["row"], at["column"]), at["kind"] == "png")
        return Response(data, media_type=f"image/{'png' if at['kind'] == 'png' else 'jpeg'}", headers=_CACHED)

    def layer(self, request: Request) -> Response:
        at = request.path_params
        smooth = request.query_params.get("smooth") == "1"
        data = self._scene.layer(at["key"], at["layer"], (at["zoom"], at["row"], at["column"]), smooth)
        return Response(data, media_type="image/png", headers=_CACHED)

    def regions(self, request: Request) -> Response:
        return _json(self._scene.regions(request.path_params["key"]))

    def annotations(self, request: Request) -> Response:
        features, state = self._scene.annotations(request.path_params["key"])
        return _json(features, ETag=f'"{state}"')

    async def save(self, request: Request) -> Response:
        state = request.headers.get("if-match", "").strip('"')
        data = await _body(request)
        # In a thread: writing and syncing a file would stop all other requests.
        new_state = await run_in_threadpool(self._scene.save, request.path_params["key"], data, state)
        return _json({"saved": True}, ETag=f'"{new_state}"')

    def _folder(self, request: Request) -> Any:
        number = request.path_params["number"]
        if number >= len(self._gallery.predictions):
            raise HTTPException(404)
        return self._gallery.predictions[number]

    def _slide_of(self, request: Request) -> Any:
        """Return the slide of the request's prediction with the request's id; 404 if there is none."""
        folder, slide_id = self._folder(request), request.path_params["slide_id"]
        for slide in self._gallery.slides.values():
            # Addresses are UTF-8, names of files need not be.
            if slide.predictions == folder and in_utf8(slide.slide_id) == slide_id:
                return slide
        raise HTTPException(404)
