"""Clients of object storage, one for each bucket and process; their errors become those of a file system.

The library is obstore: requests release the interpreter's lock, many threads share the connections of one client, and
requests that end in transient errors (5xx, 429, connections refused or reset) are repeated, see `_RETRIES`.
Keys and endpoints come from the usual environment variables (``AWS_…``, ``GOOGLE_…``, ``STORAGE_EMULATOR_HOST``).
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hyfi_core.errors import RequestError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "https", "http", "memory")
LISTABLE = ("s3", "gs", "memory")
"""Schemes whose folders can be listed and written; from the others, files are read by name."""

_RETRIES = 15
"""Most retries of a request. Pauses are random, each at most twice the one before; together they take 15 to 60 s, 24 s
in the median. No retry begins after `_GIVE_UP_S`."""
_BACKOFF_S = (0.5, 10.0)
"""First and longest pause."""
_GIVE_UP_S = 60.0
"""Time since the first attempt after which a request is not repeated."""
_TIMEOUT_S = 30.0
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("STORAGE_EMULATOR_HOST",),  # of Google's own libraries, for a server on this machine
}
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_HOW_TO_SIGN = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket; for a server of "
    "your own also AWS_ENDPOINT_URL"
)

_clients: dict[tuple[int, str, str], Any] = {}
_lock = threading.Lock()


def require_library(address: str) -> None:
    """Check that obstore is installed.

    Raises:
        RequestError: It is not; the message names the extra of the package.
    """
    if find_spec("obstore") is None:
        raise RequestError(f"{address}: object storage needs the package obstore; pip install 'hyfi[cloud]'")


def client_of(scheme: str, bucket: str) -> ObjectStore:
    """Return this process's client for a bucket or a host.

    Args:
        scheme: One of `SCHEMES`.
        bucket: Name of the bucket; for ``http`` and ``https`` the host, with its port if any.

    Raises:
        RequestError: There are no credentials for a bucket of ``s3``, or this process was forked from one with clients.
    """
    # `fork` copies only the calling thread, not those of obstore: a request of the child would never end. `tuple`,
    # because another thread may add a client meanwhile.
    if any(process != os.getpid() for process, *_ in tuple(_clients)):
        raise RequestError(
            f"{scheme}://{bucket}: this process was forked after its parent had used object storage, whose threads it "
            f"does not have; start it anew (multiprocessing's method spawn), or use object storage first in the child"
        )
    # The endpoint is part of the key: a notebook or a test may change it while the process runs.
    key = os.getpid(), f"{scheme}://{bucket}", _endpoint(scheme)
    with _lock:
        # Under the lock, so that there is one client: two memory stores would have different contents.
        if key not in _clients:
            _clients[key] = _new_client(scheme, bucket)
        return _clients[key]  # type: ignore[no-any-return]


def _new_client(scheme: str, bucket: str) -> ObjectStore:
    """Return a client of obstore for a bucket, or for the server of an HTTP address."""
    from obstore import store

    if scheme == "memory":
        return store.MemoryStore()
    low, high = _BACKOFF_S
    settings: dict[str, Any] = {
        "retry_config": {
            "max_retries": _RETRIES,
            "backoff": {"init_backoff": timedelta(seconds=low), "max_backoff": timedelta(seconds=high), "base": 2},
            "retry_timeout": timedelta(seconds=_GIVE_UP_S),
        },
        "client_options": {"timeout": timedelta(seconds=_TIMEOUT_S), "connect_timeout": timedelta(seconds=5)},
    }
    endpoint = _endpoint(scheme)
    # Off by default in obstore. Allow it only for addresses that the user gave as http: credentials are not encrypted.
    settings["client_options"]["allow_http"] = endpoint.startswith("http://") or scheme == "http"
    if scheme == "gs":
        return store.GCSStore(bucket, **settings | _emulated(endpoint))
    if scheme == "s3":
        _require_credentials(bucket, endpoint)
        return store.S3Store(bucket, **settings)
    return store.HTTPStore.from_url(f"{scheme}://{bucket}", **settings)


def _endpoint(scheme: str) -> str:
    """Return the address of a server other than the provider's, from the environment; empty if it names none."""
    address = next((os.environ[name] for name in _ENDPOINTS.get(scheme, ()) if os.environ.get(name)), "")
    return address.rstrip("/") if "://" in address or not address else f"http://{address}"


def _emulated(endpoint: str) -> dict[str, str]:
    """Return the settings of a client for an emulator of Google's server, which checks no credentials."""
    # The client takes another server's address only from the key of a service account: give one that signs nothing.
    nobody = {"private_key": "", "private_key_id": "", "client_email": "", "disable_oauth": True}
    return {"service_account_key": json.dumps(nobody | {"gcs_base_url": endpoint})} if endpoint else {}


def _require_credentials(bucket: str, endpoint: str) -> None:
    """Refuse a custom endpoint without credentials; for Amazon's own, the machine's role may have them."""
    unsigned = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes")
    if endpoint and not unsigned and not any(os.environ.get(name) for name in _CREDENTIALS):
        raise RequestError(f"s3://{bucket}: there are no credentials for {endpoint}; {_HOW_TO_SIGN}")


@contextmanager
def as_file_errors(address: str) -> Iterator[None]:
    """Context that turns errors of obstore into those of a file system, with a text that a user can act on.

    Args:
        address: The object, for messages.

    Raises:
        FileNotFoundError: There is no such object.
        FileExistsError: It exists already, or is another version than expected.
        PermissionError: The credentials are missing, wrong or not sufficient.
        OSError: There is no such bucket, or the server did not answer any attempt.
    """
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        # Errors of the system have an error number; obstore's own OSErrors have none.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _translated(error, address) from None


def is_out_of_range(error: OSError) -> bool:
    """Whether an error says that an object ends before the requested range."""
    return error.errno == errno.ERANGE


def _translated(error: Exception, address: str) -> OSError:
    """Return the error that a file would raise, with what the user can do."""
    text, kind = str(error), type(error).__name__
    scheme, _, path = address.partition("://")
    bucket, endpoint = path.partition("/")[0], _endpoint(scheme)
    where = f" at {endpoint}" if endpoint else ""
    # First, because obstore also reports a missing bucket as NotFoundError.
    if "NoSuchBucket" in text or "The specified bucket does not exist" in text:
        reason = f"there is no bucket {bucket!r}{where}; create it, or correct the name"
        return OSError(errno.ENODEV, reason, address)
    if isinstance(error, FileNotFoundError) or kind == "NotFoundError":
        return FileNotFoundError(errno.ENOENT, "No such object", address)
    if kind in ("AlreadyExistsError", "PreconditionError"):
        return FileExistsError(errno.EEXIST, "it exists already, or was changed in the meantime", address)
    if "416 Range" in text or "InvalidRange" in text or "InvalidGetRange" in text:
        return OSError(errno.ERANGE, "the object is cut short", address)
    # The metadata server of cloud machines: a client asks it only if it has no credentials.
    if "169.254.169.254" in text or "metadata.google" in text:
        signing = _HOW_TO_SIGN if scheme == "s3" else "set GOOGLE_APPLICATION_CREDENTIALS"
        return PermissionError(errno.EACCES, f"there are no credentials; {signing}", address)
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or re.search(r"\b40[13] (Forbidden|Unauth)", text):
        code = re.search(r"<Code>(\w+)</Code>", text)
        reason = f"access denied{where}{f': {code[1]}' if code else ''}; check the credentials and their rights"
        return PermissionError(errno.EACCES, reason, address)
    return OSError(errno.EIO, f"the server fails or does not answer: {_short(text)}", address)


def _short(text: str) -> str:
    """Return the first line of an error of obstore, without the debug output and addresses of requests."""
    first = text.split("\n\nDebug source")[0].split("\n")[0]
    first = re.sub(r"<\?xml.*", "", first)
    first = re.sub(r", max_retries: \d+, retry_timeout: \S+", "", first).strip()
    return re.sub(r"^Generic \w+ error: ", "", first)[:300]
