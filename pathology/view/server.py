"""The viewer's web server: pages, tiles and annotations of one gallery, for whoever knows its token.

Every address begins with a random token; whatever does not is refused with 403 before anything is looked at. Slides
are named by their key in the gallery and files of the page by their name in a table: no address becomes a path.
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
from data.store.slide_store import StoreError
from hyfi_core.errors import RequestError
from pathology.errors import SlideError
from pathology.view.annotations import LARGEST_BYTES, AnnotationError, ChangedMeanwhileError
from pathology.view.scene import NotInGalleryError, Scene
from pathology.view.web_files import (
    HEADERS,
    PAGE_HEADERS,
    as_json,
    knows_viewer,
    list_page,
    static_file,
    with_viewer,
)

PAGE_FILE, REPORT_FILE = "index.html", "report.html"
_KEPT = {**HEADERS, "Cache-Control": "private, max-age=86400, immutable"}  # the token changes with every start
_FRESH = {**HEADERS, "Cache-Control": "no-store"}
_STATUS = {NotInGalleryError: 404, ChangedMeanwhileError: 412, AnnotationError: 422, RequestError: 409}


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_urlsafe(24)


class TokenGate:
    """Refuses every request whose address does not begin with the token.

    Args:
        app: answers the others.
        token: the first part of their path.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        if scope["type"] == "http":
            first = scope["path"].lstrip("/").split("/", 1)[0]
            if not secrets.compare_digest(first.encode("utf-8", "replace"), self._token):
                words = "This address needs the token that hyfi view printed when it started.\n"
                await PlainTextResponse(words, 403, headers=_FRESH)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def make_app(scene: Scene, token: str) -> ASGIApp:
    """Return the web application of a scene; ``token`` begins every address. It closes the gallery when it ends."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # A few tiles at a time: each needs some megabytes while it is cut, and more threads than cores win nothing.
        anyio.to_thread.current_default_thread_limiter().total_tokens = usable_cores() + 2
        yield
        scene.gallery.close()

    answers = _Answers(scene)
    mounted = Mount(f"/{token}", routes=answers.routes())
    refusals: dict[Any, Any] = dict.fromkeys((HTTPException, SlideError, StoreError, RequestError, OSError), _refused)
    return TokenGate(Starlette(routes=[mounted], lifespan=lifespan, exception_handlers=refusals), token)


def _refused(request: Request, error: Exception) -> Response:
    """Say in JSON why a request is not answered."""
    if isinstance(error, HTTPException):
        return _json({"error": error.detail}, status=error.status_code)
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 409)
    return _json({"error": str(error)}, status=status)


def _json(value: object, status: int = 200, **headers: str) -> Response:
    return Response(as_json(value), status, media_type="application/json", headers={**_FRESH, **headers})


async def _body(request: Request) -> bytes:
    """Return what is sent, as long as it is not too much to hold."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > LARGEST_BYTES:
            raise HTTPException(413, f"annotations of more than {LARGEST_BYTES} bytes are not taken")
    return bytes(data)


class _Answers:
    """One method for each address; plain functions run on threads."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._gallery = scene, scene.gallery

    def routes(self) -> list[Route]:
        """Return the addresses after the token."""
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
            Route("/slide/{key}/export.geojson", self.export, methods=["POST"]),
        ]

    def first(self, request: Request) -> Response:
        return RedirectResponse("cohort/0/" if self._gallery.predictions else "view", 302, headers=_FRESH)

    def viewer(self, request: Request) -> Response:
        found = static_file("viewer.html")
        assert found is not None, "the page is part of this package"
        return HTMLResponse(found[0], headers=PAGE_HEADERS)

    def static(self, request: Request) -> Response:
        found = static_file(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return Response(found[0], media_type=found[1], headers=_KEPT)

    def cohort(self, request: Request) -> Response:
        folder = self._folder(request)
        number = request.path_params["number"]
        path = folder / PAGE_FILE
        page = path.read_text(encoding="utf-8") if path.is_file() else ""
        if knows_viewer(page):
            return HTMLResponse(with_viewer(page, f"../../open/{number}/"), headers=_FRESH)
        slides = [one for one in self._gallery.slides.values() if one.predictions == folder]
        links = [(f"../../view?slide={quote(one.key, safe='')}", one.slide_id, one.prediction) for one in slides]
        return HTMLResponse(list_page(f"Predictions in {folder.name}", links), headers=_FRESH)

    def report(self, request: Request) -> Response:
        path = self._slide_of(request).predictions / request.path_params["slide_id"] / REPORT_FILE
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
        return Response(data, media_type=f"image/{'png' if at['kind'] == 'png' else 'jpeg'}", headers=_KEPT)

    def layer(self, request: Request) -> Response:
        at = request.path_params
        smooth = request.query_params.get("smooth") == "1"
        data = self._scene.layer(at["key"], at["layer"], (at["zoom"], at["row"], at["column"]), smooth)
        return Response(data, media_type="image/png", headers=_KEPT)

    def regions(self, request: Request) -> Response:
        return _json(self._scene.regions(request.path_params["key"]))

    def annotations(self, request: Request) -> Response:
        found, state = self._scene.annotations(request.path_params["key"])
        return _json(found, ETag=f'"{state}"')

    async def save(self, request: Request) -> Response:
        state = request.headers.get("if-match", "").strip('"')
        data = await _body(request)
        now = await run_in_threadpool(self._scene.save, request.path_params["key"], data, state)
        return _json({"saved": True}, ETag=f'"{now}"')

    async def export(self, request: Request) -> Response:
        data = await _body(request)
        return _json(await run_in_threadpool(self._scene.exported, request.path_params["key"], data))

    def _folder(self, request: Request) -> Any:
        number = request.path_params["number"]
        if number >= len(self._gallery.predictions):
            raise HTTPException(404)
        return self._gallery.predictions[number]

    def _slide_of(self, request: Request) -> Any:
        folder, slide_id = self._folder(request), request.path_params["slide_id"]
        for one in self._gallery.slides.values():
            if one.predictions == folder and one.slide_id == slide_id:
                return one
        raise HTTPException(404)
