"""Where stores and tables are: a folder of this machine, or object storage.

`location` turns a user's text into a path: a `pathlib.Path`, or an :class:`data.object_path.ObjectPath` with the same
methods. Operations that differ between the two are functions of this module.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from data.object_client import SCHEMES, require_library
from data.object_path import ObjectPath
from hyfi_core.errors import RequestError

REQUESTS_AT_A_TIME = 32
"""Simultaneous requests of one process to a path that `is_far`: nearly all of the time, each waits for the network."""

# Types in /proc/self/mounts whose reads cross a network; "nfs" matches nfs4, "fuse." what FUSE mounts (sshfs, s3fs).
_NETWORK_DISKS = re.compile(r"(nfs|cifs|smb|lustre|gpfs|beegfs|ceph|glusterfs|afs|pvfs|orangefs|9p|virtiofs|fuse\.)")
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.*)", re.DOTALL)
# Also with one slash: `Path` removes the second slash of an address.
_PASSWORD = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:/{1,2}[^\s/:@]*:)[^\s/]*@")
_READ_AHEAD_BYTES = 2**14
"""Least number of bytes that are read from the end of an object: a request for fewer takes as long."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def location(user_text: str | os.PathLike[str]) -> Path:
    """Return the path of a user's text: an address (``s3://bucket/store``, ``gs://``, ``https://`` …) or a local path.

    One slash after the scheme is enough, because a `Path` made from an address keeps only one.

    Raises:
        RequestError: The scheme is not known, there is no bucket or host, or obstore is not installed.
    """
    if isinstance(user_text, ObjectPath):
        return user_text
    text = os.fspath(user_text)
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return Path(text)
    scheme, path = match[1].lower(), match[2].rstrip("/")
    if scheme == "file":
        return Path(unquote(urlsplit(f"file:///{path.removeprefix('localhost/')}").path))
    schemes = ", ".join(f"{name}://" for name in (*SCHEMES, "file"))
    if scheme not in SCHEMES:
        raise RequestError(f"{scheme}://{path}: {scheme}:// is not known; use one of {schemes}, or a local path")
    if not path:
        raise RequestError(f"{scheme}://: a bucket or host is missing, as in {scheme}://NAME/store")
    # Signed links have a query, behind which the names of a store's files cannot be appended.
    if "?" in path or "#" in path:
        raise RequestError(f"{scheme}://{path}: an address with ? or # cannot be used; give the folder's plain address")
    require_library(f"{scheme}://{path}")
    return ObjectPath(f"{scheme}://{path}")


def address_of(user_text: str | os.PathLike[str]) -> str | None:
    """Return a user's address with both slashes (a `Path` keeps only one); None if the text has no scheme."""
    match = _ADDRESS.fullmatch(str(user_text))
    return None if match is None else f"{match[1]}://{match[2]}"


def is_address(user_text: str | os.PathLike[str]) -> bool:
    """Whether a user's text has a scheme, such as ``s3://``."""
    return address_of(user_text) is not None


def without_password(text: str) -> str:
    """Return a text in which the passwords of addresses are hidden: ``https://name:***@host/store``."""
    return _PASSWORD.sub(r"\1***@", text) if "@" in text else text


def is_remote(path: Path) -> bool:
    """Whether a path is on object storage."""
    return isinstance(path, ObjectPath)


def is_far(path: Path) -> bool:
    """Whether files below a path are read over a network: from object storage or a network disk."""
    return is_remote(path) or _is_on_network_disk(str(path))


@lru_cache(maxsize=4096)
def _is_on_network_disk(path: str) -> bool:
    # Links resolved: a local name may lead to a network disk.
    real = os.path.realpath(path)
    # A disk may be mounted inside another one: the path is on the disk with the longest name.
    holding = [mount for mount in _mounts() if real == mount or real.startswith(f"{mount.rstrip('/')}/")]
    return bool(holding) and _NETWORK_DISKS.match(_mounts()[max(holding, key=len)]) is not None


@cache
def _mounts() -> dict[str, str]:
    """Return folder -> type of each mounted file system; empty if the system has no ``/proc``."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return {}
    fields = (line.split(" ") for line in lines)
    # The kernel writes blanks and backslashes of names as three octal digits, ``\040``.
    return {re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), words[1]): words[2] for words in fields}


class OpenFile(Protocol):
    """A file that is read in pieces."""

    def read(self, offset: int, length: int) -> bytes | memoryview:
        """Return bytes ``[offset, offset + length)``; fewer if the file ends before.

        Raises:
            OSError: They cannot be read.
        """
        ...

    def tail(self, length: int) -> tuple[bytes, int]:
        """Return the last ``length`` bytes (all of a shorter file) and the size of the file in bytes.

        Raises:
            OSError: They cannot be read.
        """
        ...


class _LocalFile:
    """A file of this machine, by its descriptor."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def read(self, offset: int, length: int) -> bytes:
        # `pread`, because threads would share the file position of `seek` and `read`.
        return os.pread(self._handle, length, offset)

    def tail(self, length: int) -> tuple[bytes, int]:
        size = os.fstat(self._handle).st_size
        return os.pread(self._handle, min(length, size), max(0, size - length)), size


class _RemoteFile:
    """An object on object storage. Each read is a request, unless `tail` has read these bytes already."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._last, self._last_start = b"", 0

    def read(self, offset: int, length: int) -> bytes | memoryview:
        start = offset - self._last_start
        # The tail reaches to the object's end, so a read that begins in it also ends in it.
        if self._last and start >= 0:
            return self._last[start : start + length]
        return self._path.read_range(offset, length)

    def tail(self, length: int) -> tuple[bytes, int]:
        # One request returns both the bytes and the size of the object.
        data, size = self._path.read_tail(max(length, _READ_AHEAD_BYTES))
        self._last, self._last_start = data, size - len(data)
        return data[max(0, len(data) - length) :], size


@contextmanager
def opened(path: Path) -> Iterator[OpenFile]:
    """Context that yields a file for reading in pieces; opening an object makes no request.

    Raises:
        OSError: The file cannot be opened.
    """
    if isinstance(path, ObjectPath):
        yield _RemoteFile(path)
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        yield _LocalFile(handle)
    finally:
        os.close(handle)


def sizes_of(folder: Path, names: Iterable[str]) -> dict[str, int | OSError]:
    """Return name -> size in bytes of a file below ``folder``, or the error; on object storage by one listing.

    Raises:
        OSError: The object storage cannot be reached.
    """
    # A listing takes one request for a thousand objects.
    if isinstance(folder, ObjectPath) and folder.can_list:
        tree, missing = folder.tree(), FileNotFoundError(2, "No such object")
        return {name: tree.get(name, missing) for name in names}
    file_names = list(names)

    def size(name: str) -> int | OSError:
        try:
            return (folder / name).stat().st_size
        except OSError as error:
            return error

    return dict(zip(file_names, each(size, file_names, folder), strict=True))


def files_below(folder: Path) -> list[str]:
    """Return the names of all files below ``folder``, relative to it; empty where folders cannot be listed."""
    if isinstance(folder, ObjectPath):
        return sorted(folder.tree()) if folder.can_list else []
    files = (Path(below) / name for below, _, names in os.walk(folder) for name in names)
    return sorted(file.relative_to(folder).as_posix() for file in files)


def version_of(path: Path) -> str:
    """Return a text that differs after each change of a file; empty while there is no file."""
    try:
        if isinstance(path, ObjectPath):
            return path.version()
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    # Files are replaced by renaming, which changes the inode, even if the time is the same because the clock is coarse.
    return f"{status.st_ino}-{status.st_mtime_ns}"


def versions_in(folder: Path, suffix: str) -> dict[str, str]:
    """Return name without suffix -> `version_of` each file of a folder with this suffix; no hidden files."""
    if isinstance(folder, ObjectPath):
        versions = folder.versions() if folder.can_list else {}
    else:
        versions = {path.name: version_of(path) for path in folder.glob(f"*{suffix}")}
    visible = {
        name: version for name, version in versions.items() if not name.startswith(".") and name.endswith(suffix)
    }
    return {name.removesuffix(suffix): version for name, version in sorted(visible.items())}


def remove_tree(folder: Path) -> None:
    """Remove a folder with its contents; ignore local files that cannot be removed."""
    if isinstance(folder, ObjectPath):
        each(lambda name: (folder / name).unlink(missing_ok=True), folder.tree(), folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def create_exclusively(path: Path, data: bytes = b"") -> bool:
    """Create a file; return False if it exists. If several processes try, exactly one succeeds."""
    try:
        if isinstance(path, ObjectPath):
            path.create(data)
            return True
        # POSIX: O_EXCL with O_CREAT is atomic, also on NFS from version 3 on.
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        os.write(handle, data)
    finally:
        os.close(handle)
    return True


_pools: dict[int, ThreadPoolExecutor] = {}
_inside = threading.local()


def each(act: Callable[[_Item], _Result], items: Iterable[_Item], folder: Path) -> list[_Result]:
    """Return ``[act(item) for item in items]``, many at a time if ``folder`` is far.

    Raises:
        Exception: The first that ``act`` raised.
    """
    return list(ahead(act, list(items), folder))


def ahead(act: Callable[[_Item], _Result], items: Sequence[_Item], folder: Path) -> Iterator[_Result]:
    """Yield ``act(item)`` for each item, in order; if ``folder`` is far, up to 32 of them run in advance."""
    # Inside the pool, one after the other: its threads would wait for tasks that wait for a free thread.
    if not is_far(folder) or len(items) <= 1 or getattr(_inside, "pool", False):
        yield from map(act, items)
        return
    pool = _request_pool()
    remaining = iter(items)
    under_way = deque(pool.submit(_marked, act, item) for item in islice(remaining, REQUESTS_AT_A_TIME))
    try:
        while under_way:
            result = under_way.popleft().result()
            # Before the result is yielded: the next request starts while the caller works on this one.
            under_way.extend(pool.submit(_marked, act, item) for item in islice(remaining, 1))
            yield result
    finally:
        # After the caller stopped early, or ``act`` raised.
        for future in under_way:
            future.cancel()


def _marked(act: Callable[[_Item], _Result], item: _Item) -> _Result:
    """Return ``act(item)`` after marking this thread as one of the pool, see `ahead`."""
    _inside.pool = True
    return act(item)


def _request_pool() -> ThreadPoolExecutor:
    """Return this process's pool of threads for requests; a forked child makes its own."""
    pool = _pools.get(os.getpid())
    if pool is None:
        pool = _pools.setdefault(os.getpid(), ThreadPoolExecutor(REQUESTS_AT_A_TIME, "store-request"))
    return pool
