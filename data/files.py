"""Files and directories: replaced atomically (written under a temporary name, synced, renamed); found by name."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import resource
import socket
import stat
import unicodedata
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data.location import files_below, is_remote, remove_tree, sizes_of
from hyfi_core.files import naming, swap_directory, sync_file

# Each upload has its whole file in memory: this bounds the memory, too.
_UPLOADS_AT_A_TIME = 4
_USUAL_FILES = 1024
"""Files that a process may usually have open on Linux."""


def temporary_path(path: Path) -> Path:
    """Return this process's temporary name for ``path``: ``.name.tmp-<host>-<pid>`` in the same folder."""
    # In the same folder: `rename` is atomic only within a file system. Host and pid name the process that left it.
    return path.with_name(f".{path.name}.tmp-{socket.gethostname()}-{os.getpid()}")


def private_folder(folder: Path) -> None:
    """Make a folder that only this user may enter; if this user's folder exists, close it to others.

    Names in the system's temporary folder are predictable: another user could create the folder, or a link of this
    name, first and then read what is written there.

    Raises:
        PermissionError: It belongs to another user, or is a link.
        OSError: It cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Without `exist_ok`, `mkdir` neither follows a link nor accepts an existing folder: a folder that it makes is ours.
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # `lstat`, because a link may lead to a folder of this user that others can reach by another name.
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(errno.EACCES, "it belongs to another user, or is a link; remove it", str(folder))
    if status.st_mode & 0o077:
        folder.chmod(0o700)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``: readers see the old content or the new, even after a crash."""
    # Object storage replaces an object atomically, when its upload is complete.
    if is_remote(path):
        path.write_bytes(data)
        return
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context that yields a temporary path; at its end, the file there is synced and replaces ``path``.

    After an exception the temporary file is removed and ``path`` is unchanged.
    """
    temporary = temporary_path(path)
    try:
        with naming(path):
            yield temporary
        # Sync the content before it gets its name: after a power cut, a file of that name is never empty. Sync the
        # folder last, because its entry is what the renaming changes.
        sync_file(temporary)
        temporary.replace(path)
        sync_file(path.parent)
    # Also KeyboardInterrupt: otherwise each interruption would leave a file.
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json_atomically(path: Path, value: dict[str, Any]) -> None:
    """Replace ``path`` by this object as JSON."""
    write_atomically(path, json_bytes(value))


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no such file, or it contains anything else."""
    try:
        # As `json_bytes` writes it.
        value = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def in_utf8(text: str) -> str:
    r"""Return a text in which bytes of file names that are not UTF-8 are escaped (`\udcfc`): browsers refuse them."""
    return text.encode("utf-8", "backslashreplace").decode()


def json_in_utf8(value: object) -> str:
    """Return compact JSON in which bytes of file names that are not UTF-8 are escaped in texts, as `in_utf8` does.

    Python has these bytes as lone surrogates, which a page's script could not put into a URL.

    Raises:
        ValueError: A number is NaN or infinite, which JSON does not have.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # The text contains a backslash, which JSON writes as two.
    return re.sub("[\ud800-\udfff]", lambda half: f"\\\\u{ord(half[0]):04x}", text)


def json_bytes(value: dict[str, Any]) -> bytes:
    """Return the object as indented JSON in UTF-8; undecodable bytes of file names are kept."""
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "surrogateescape")


def sync_tree(folder: Path, only: str | None = None) -> None:
    """Sync a folder and everything below it to disk; with ``only``, the folders and the files of this name."""
    folders = list(os.walk(folder))
    files = [Path(path) / name for path, _, names in folders for name in names if only in (None, name)]
    # In parallel: a disk serves many waiting writers at once.
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(sync_file, files))
        # Folders after files: an entry on the disk must not name a file that is not there yet.
        list(pool.map(sync_file, [Path(path) for path, _, _ in folders]))


def publish_directory(prepared: Path, final: Path) -> None:
    """Rename the finished directory ``prepared`` to ``final``, replacing an older one if there is one."""
    temporary = temporary_path(final)
    replaced = temporary.with_name(temporary.name.replace(".tmp-", ".old-"))
    swap_directory(prepared, final, replaced)


def upload_directory(prepared: Path, final: Path, last: str = "zarr.json", without: Collection[str] = ()) -> None:
    """Copy a directory to object storage; it appears to readers when its file ``last`` is written, at the end.

    First it removes an older version and the files of an interrupted copy. Memory: four files at a time.

    Args:
        prepared: The finished directory.
        final: Where its files go.
        last: The file by which readers recognise it.
        without: Files that are not copied.

    Raises:
        OSError: The object storage cannot be written, or files have not arrived as they were sent.
    """
    names = [name for name in files_below(prepared) if name != last and name not in without]
    # First of all, so that a reader of the old version does not get new files.
    (final / last).unlink(missing_ok=True)
    # Also removes files that the new version does not have; a listing would show them as its files.
    remove_tree(final)

    def copy(name: str) -> None:
        (final / name).write_bytes((prepared / name).read_bytes())

    with ThreadPoolExecutor(_UPLOADS_AT_A_TIME, "upload") as pool:
        list(pool.map(copy, names))
    sent = {name: (prepared / name).stat().st_size for name in names}
    # Check the sizes, by one listing, before `last` announces the files.
    if sizes_of(final, sent) != sent:
        raise OSError(errno.EIO, "files are missing or incomplete after the upload", str(final))
    copy(last)


def remove_leftovers(final: Path) -> None:
    """Remove temporary files beside ``final`` of ended processes on this host; restore a version left renamed."""
    host = socket.gethostname()
    for kind in ("tmp", "old"):
        prefix = f".{final.name}.{kind}-{host}-"
        for path in list(final.parent.glob(f"{glob.escape(prefix)}*")):
            pid = path.name.removeprefix(prefix)
            # A leftover with this process's own id is that of an earlier process: in containers, ids recur.
            if pid.isdigit() and int(pid) != os.getpid() and is_running(int(pid)):
                continue
            # The process ended between the two renames of `swap_directory`: the old version is the only one.
            if kind == "old" and not final.exists():
                path.rename(final)
            else:
                remove_tree(path)


def restore_replaced(folder: Path) -> None:
    """Restore directories in ``folder`` that ended processes of this host had renamed to replace them."""
    ending = re.compile(rf"\.(.+)\.old-{re.escape(socket.gethostname())}-[0-9]+")
    for path in [] if is_remote(folder) else list(folder.glob(".*.old-*")):
        name = ending.fullmatch(path.name)
        if name is not None and not (folder / name[1]).exists():
            remove_leftovers(folder / name[1])


def reason_of(error: OSError) -> str:
    """Return the system's text for an error; for too many open files, also the limit and how to raise it."""
    reason = error.strerror or str(error)
    if error.errno != errno.EMFILE:
        return reason
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = max(_USUAL_FILES, 4 * limit)
    # Users can raise it up to the hard limit.
    if hard_limit != resource.RLIM_INFINITY:
        more = min(more, hard_limit)
    advice = f"raise it by `ulimit -n {more}` before the command" if more > limit else "an administrator can raise it"
    return f"{reason}; a process may have {limit}: {advice}"


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256 as hexadecimal digits."""
    if is_remote(path):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_running(pid: int) -> bool:
    """Whether a process with this id, of any user, runs on this host."""
    try:
        # Signal 0 only checks that the process exists and may be signalled.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # It exists, and belongs to another user.
    except PermissionError:
        return True
    return True


def as_on_disk(path: Path) -> Path:
    """Return the existing path that equals ``path`` but for the Unicode form of its names: macOS writes another form.

    Returns ``path`` itself if it exists, or if none or several are equal to it.
    """
    if str(path).isascii() or os.path.lexists(path) or path.parent == path:
        return path
    folder, plain = as_on_disk(path.parent), unicodedata.normalize("NFC", path.name)
    with suppress(OSError):
        same = [name for name in os.listdir(folder) if unicodedata.normalize("NFC", name) == plain]  # noqa: PTH208
        return folder / same[0] if len(same) == 1 else path
    return path
