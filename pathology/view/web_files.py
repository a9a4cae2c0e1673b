"""Static files of the viewer, and the HTML pages of predictions with links to the viewer."""

from __future__ import annotations

from html import escape
from pathlib import Path

from data.files import in_utf8

TEMPLATES = Path(__file__).parent / "templates"
LEAFLET = Path(__file__).parent / "leaflet"
"""Leaflet 1.9.4 as it is distributed, with its licence; its images are not used."""
HEADERS = {
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
PAGE_HEADERS = {
    **HEADERS,
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}


def static_file(name: str) -> tuple[bytes, str] | None:
    """Return content and media type of a static file; None if there is none with this name."""
    files = {path.name: path for folder in (TEMPLATES, LEAFLET) for path in folder.iterdir() if path.suffix in _TYPES}
    path = files.get(name)
    return None if path is None else (path.read_bytes(), _TYPES[path.suffix])


def with_viewer(page: str, address: str) -> str:
    """Return a page of `hyfi predict` whose table links to ``address`` + slide_id.

    The page's script reads the address from the element ``hyfi-viewer``, which is added here.
    """
    head = f'<head>\n<meta name="hyfi-viewer" content="{escape(address)}">\n<link rel="icon" href="data:,">'
    return page.replace("<head>", head, 1)


def knows_viewer(page: str) -> bool:
    """Whether a page supports `with_viewer`; pages of earlier versions do not."""
    return "hyfi-viewer" in page


def list_page(title: str, links: list[tuple[str, str, str]]) -> str:
    """Return a simple page with a list of links, each (address, text, note)."""
    rows = "\n".join(f'<li><a href="{escape(url)}">{escape(text)}</a> {escape(note)}</li>' for url, text, note in links)
    return in_utf8(
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<link rel="icon" href="data:,"></head><body><h1>{escape(title)}</h1><ul>{rows}</ul></body></html>'
    )
