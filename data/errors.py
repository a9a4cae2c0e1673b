"""The error of a store that cannot be used."""

from __future__ import annotations

from hyfi_core.errors import RequestError


class StoreError(RequestError):
    """A store or one of its slides is missing, damaged or of another version; the message names file and cause."""
