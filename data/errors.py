"""The error of a store that cannot be used."""

from __future__ import annotations

from hyfi_core.errors import RequestError


class StoreError(RequestError):
    """A store, or one slide of it, is missing, damaged or of another version; names file and cause."""
