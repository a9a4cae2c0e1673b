"""A path on object storage that can be used where a `pathlib.Path` of a store is used.

``s3://bucket/store/slide.zarr`` has parts, names and parents like any path, and `read_bytes`, `stat`, `glob` … are
requests. A folder exists if there are objects below it. Operations that need a real file (``open``, ``rename``, a
library that opens files itself) raise an error, because the path has no name in the file system.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import PosixPath
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from data.object_client import LISTABLE, as_file_errors, client_of, is_out_of_range
from hyfi_core.errors import RequestError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_Answer = TypeVar("_Answer")

_MARKERS = ("manifest.csv", "zarr.json")
"""Objects by which a store or a slide is recognised without listing it."""
_OBJECTS = (".json", ".csv", ".png", ".jpg", ".html")
"""Suffixes of names that are never folders."""


class ObjectPath(PosixPath):
    """An object, or a folder of objects; may be pickled, and used in any thread.

    Requests raise `OSError`, as :func:`data.object_client.as_file_errors` says.
    """

    def __str__(self) -> str:
        """Return the address, or a relative path."""
        scheme, *parts = self.parts or ("",)
        return f"{scheme}//{'/'.join(parts)}" if scheme.endswith(":") else "/".join(self.parts)

    def __fspath__(self) -> NoReturn:
        """Refuse to be used as a local file.

        Raises:
            RequestError: Always.
        """
        raise RequestError(f"{self}: a local file is needed here, not one on object storage; copy it to a local disk")

    @property
    def scheme(self) -> str:
        """The scheme, ``s3`` for instance."""
        return self.parts[0].removesuffix(":")

    @property
    def key(self) -> str:
        """Name of the object in its bucket."""
        return "/".join(self.parts[2:])

    @property
    def can_list(self) -> bool:
        """Whether folders can be listed; web servers only give files by name."""
        return self.scheme in LISTABLE

    def absolute(self) -> Self:
        """Return the path itself."""
        return self

    def resolve(self, strict: bool = False) -> Self:
        """Return the path itself."""
        return self

    def read_bytes(self) -> bytes:
        """Return the whole object."""
        import obstore

        return self._request(lambda client: obstore.get(client, self.key).bytes().to_bytes())

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """Return the whole object as text."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def read_range(self, offset: int, length: int) -> bytes | memoryview:
        """Return bytes ``[offset, offset + length)``, not copied; fewer if the object ends before."""
        import obstore

        if not length:
            return b""
        try:
            return self._request(
                lambda client: memoryview(obstore.get_range(client, self.key, start=offset, length=length))
            )
        except OSError as error:
            if is_out_of_range(error):
                return b""
            raise

    def read_tail(self, length: int) -> tuple[bytes, int]:
        """Return the last ``length`` bytes (all of a shorter object) and the size of the object in bytes."""
        import obstore

        def ask(client: ObjectStore) -> tuple[bytes, int]:
            response = obstore.get(client, self.key, options={"range": {"suffix": length}})
            return response.bytes().to_bytes(), response.meta["size"]

        return self._request(ask)

    def write_bytes(self, data: Any) -> int:
        """Replace the object; readers see the old content or the new."""
        self._put(bytes(data), "overwrite")
        return len(data)

    def create(self, data: bytes) -> str:
        """Create the object; return its `revision`.

        Raises:
            FileExistsError: It exists already.
        """
        return self._put(data, "create")

    def replace_revision(self, data: bytes, revision: str) -> str:
        """Replace the object if this is still its `revision`; return the new one.

        Raises:
            FileExistsError: It has another revision now.
            FileNotFoundError: It was removed; Google's servers raise `FileExistsError` in this case, too.
        """
        return self._put(data, {"version" if self.scheme == "gs" else "e_tag": revision})

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        """Write an empty object."""
        self._put(b"", "overwrite" if exist_ok else "create")

    def _put(self, data: bytes, mode: Any) -> str:
        """Write the object; return its `revision`. ``mode`` is that of ``obstore.put``; it may refuse to overwrite."""
        import obstore

        # In one request: an interrupted multipart upload would leave parts that no listing shows.
        put = self._request(lambda client: obstore.put(client, self.key, data, mode=mode, use_multipart=False))
        return self._revision_in(put)

    def _revision_in(self, answer: Any) -> str:
        """Return the `revision` from an answer of obstore to ``put`` or ``head``."""
        # A conditional write names the version that it replaces: the object's generation (a number) at Google, its tag
        # everywhere else.
        return answer["version" if self.scheme == "gs" else "e_tag"] or ""

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return size and time of the object.

        Raises:
            FileNotFoundError: There is no such object.
        """
        meta = self._head()
        time_s = meta["last_modified"].timestamp()
        return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, meta["size"], time_s, time_s, time_s))

    def lstat(self) -> os.stat_result:
        """Return `stat`; there are no links."""
        return self.stat()

    def version(self) -> str:
        """Return a text that differs after each change of the object; `listing` has the same texts.

        Raises:
            FileNotFoundError: There is no such object.
        """
        return self._head()["e_tag"] or ""

    def revision(self) -> str:
        """Return the text that `replace_revision` compares to recognise the object's content.

        Raises:
            FileNotFoundError: There is no such object.
        """
        return self._revision_in(self._head())

    def _head(self) -> Any:
        import obstore

        return self._request(lambda client: obstore.head(client, self.key))

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        try:
            self._head()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether this is a slide (``zarr.json``, its last file, exists), a store, or a folder with any object."""
        # List only as the last resort: a listing is slower than a request for one object, and costs more.
        if self.suffix == ".zarr":
            return (self / "zarr.json").is_file()
        if any((self / name).is_file() for name in _MARKERS):
            return True
        return self.can_list and bool(self._entries())

    def exists(self) -> bool:
        """Whether there is an object, or a folder as `is_dir` says."""
        if self.key and self.suffix != ".zarr" and self.is_file():
            return True
        return self.suffix not in _OBJECTS and self.is_dir()

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: folders exist by their objects."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object; nearly all servers give no error if there is none, whatever ``missing_ok``."""
        import obstore

        try:
            self._request(lambda client: obstore.delete(client, self.key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def iterdir(self) -> Iterator[Self]:  # type: ignore[override]
        """Yield objects and folders directly below."""
        yield from (self / name for name in self._entries())

    def glob(self, pattern: str) -> Iterator[Self]:  # type: ignore[override]
        """Yield objects and folders directly below whose name matches a pattern without slashes."""
        yield from (self / name for name in self._entries() if fnmatch.fnmatchcase(name, pattern))

    def versions(self) -> dict[str, str]:
        """Return name -> version of each object directly below, by one listing."""
        return {name: version for name, version in self._entries().items() if version is not None}

    def tree(self) -> dict[str, int]:
        """Return relative name -> size in bytes of every object below.

        Raises:
            OSError: Folders of this scheme cannot be listed.
        """
        return {name: size for name, (size, _) in self.listing().items()}

    def listing(self) -> dict[str, tuple[int, str]]:
        """Return relative name -> (size in bytes, `version`) of every object below.

        Raises:
            OSError: Folders of this scheme cannot be listed.
        """
        import obstore

        self._require_listing()
        prefix = f"{self.key}/" if self.key else ""

        def ask(client: ObjectStore) -> dict[str, tuple[int, str]]:
            every = (meta for page in obstore.list(client, prefix) for meta in page)
            return {meta["path"].removeprefix(prefix): (meta["size"], meta["e_tag"] or "") for meta in every}

        return self._request(ask)

    def _entries(self) -> dict[str, str | None]:
        """Return name -> version of each object directly below; None for a folder."""
        import obstore

        self._require_listing()

        def ask(client: ObjectStore) -> dict[str, str | None]:
            listing = obstore.list_with_delimiter(client, self.key or None)
            folders = {path.rstrip("/").rpartition("/")[2]: None for path in listing["common_prefixes"]}
            return folders | {meta["path"].rpartition("/")[2]: meta["e_tag"] or "" for meta in listing["objects"]}

        return self._request(ask)

    def _require_listing(self) -> None:
        if not self.can_list:
            raise OSError(None, f"folders at {self.scheme}:// cannot be listed", str(self))

    def _request(self, ask: Callable[[ObjectStore], _Answer]) -> _Answer:
        """Return ``ask(client)``; errors of obstore are raised as those of a file system."""
        client = client_of(self.scheme, self.parts[1])
        with as_file_errors(str(self)):
            return ask(client)
