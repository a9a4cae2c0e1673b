"""Ingest of one slide, atomically."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.location import location
from data.store.manifest import DONE, FAILED, SlideRecord, record_path
from data.store.metadata import digest_of_group
from data.store.sharded_array import read_json
from data.store.slide_store import SlideStore, StoreError, slide_path
from data.store.unfinished import working_folder
from data.store.writer import SlideWriter
from hyfi_core.errors import RequestError
from pathology.claims import ClaimLostError
from pathology.errors import SlideError
from pathology.ingest.content import content_of
from pathology.ingest.discover import user_columns
from pathology.ingest.forecast import require_room
from pathology.ingest.identity import RunningDigest, SourceStamp
from pathology.ingest.options import IngestOptions
from pathology.ingest.provenance import facts_of, provenance, versions
from pathology.ingest.pseudonyms import scrubbed
from pathology.ingest.staging import staged
from pathology.readers.file_check import check_file
from pathology.readers.mpp import SourceMpp
from pathology.readers.slide_source import SlideSource
from pathology.readers.sources import open_source
from pathology.readers.tiff_metadata import is_truncated

_CONCERNS_ALL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE}
"""Errors of the disk or the process that would affect all further slides, too."""


def ingest_slide(
    source: Path,
    store: Path,
    options: IngestOptions,
    manifest_row: dict[str, str] | None = None,
    slide_id: str | None = None,
    *,
    secret: str = "",
    threads: int = 0,
    progress: Callable[[float], None] = lambda fraction: None,
) -> SlideRecord:
    """Ingest one slide and write its record; a failed slide leaves only its record with the reason.

    Memory: one shard (48 MiB) of each level, bands of decoded tiles, and the slide at about 8 µm per pixel.

    Args:
        source: The slide's file.
        store: The store's folder; created if it does not exist.
        options: How to ingest; see `IngestOptions`.
        manifest_row: The slide's row of the user's manifest, whose columns go into the record.
        slide_id: The slide's name; None: that of the row, else the file's name without its suffix.
        secret: If not empty, name, path and time of the file are not stored (see `pathology.ingest.pseudonyms`).
        threads: Number of chunks encoded at a time; 0: one for each core.
        progress: Called with the completed fraction, before each shard and before the final rename; it may raise
            `ClaimLostError`.

    Returns:
        The record, ``done`` or ``failed``. On failure, an earlier finished version of the slide is kept.

    Raises:
        OSError: The store cannot be written (full disk, no permission), which affects all slides.
        ClaimLostError: From ``progress``.
    """
    row = dict(manifest_row or {})
    name = slide_id or row.get("slide_id") or source.stem
    store.mkdir(parents=True, exist_ok=True)
    (store / ".records").mkdir(exist_ok=True)
    work = _SlideIngest(source, store, options, row, name, secret, threads, progress)
    try:
        record = work.run()
    except (SlideError, RequestError) as error:  # RequestError: given tissue outlines do not fit the slide
        record = work.failed(str(error))
    except OSError as error:
        if _concerns_store(error, store, options.cache):
            raise
        record = work.failed(f"the file cannot be read: {error.strerror or error}")
    except ClaimLostError:
        raise
    except Exception as error:
        # An unexpected error in a reader: this slide fails, and the ingest goes on. With pseudonyms, omit the message,
        # which may quote the file.
        record = work.failed(type(error).__name__ if secret else f"{type(error).__name__}: {error}")
    record = replace(record, extra=user_columns(row))
    save_outcome(record, store)
    return record


def save_outcome(record: SlideRecord, store: Path) -> None:
    """Save a slide's record; an earlier finished version keeps its record, with the reason of the failure."""
    path = record_path(store, record.slide_id)
    # A failure must not hide an earlier version of the slide, which is still in the store.
    if record.status == FAILED and path.exists() and slide_path(store, record.slide_id).exists():
        with suppress(StoreError):
            earlier = SlideRecord.load(path)
            if earlier.status == DONE:
                record = replace(
                    earlier, reason=f"the earlier result is kept; ingesting it again failed: {record.reason}"
                )
    record.save(store)


@dataclass(frozen=True, slots=True)
class _SlideIngest:
    """One run of `ingest_slide`: its arguments and its steps."""

    source: Path
    store: Path
    options: IngestOptions
    row: dict[str, str]
    name: str
    secret: str
    threads: int
    progress: Callable[[float], None]

    def failed(self, reason: str) -> SlideRecord:
        """Return the record of a slide that failed."""
        if self.secret:
            reason = scrubbed(reason, self.source, self.name)
        return SlideRecord(self.name, self._source_path, FAILED, reason=reason)

    @property
    def _source_path(self) -> str:
        """Path of the file for the record; empty with pseudonyms."""
        return "" if self.secret else str(self.source.absolute())

    def run(self) -> SlideRecord:
        """Ingest the slide; `ingest_slide` turns exceptions into a record."""
        check_file(self.source)  # before it is copied or hashed: reading a pipe would block
        stamp = SourceStamp.of(self.source)
        pick = self.options.pick(self.row)
        # The digest is that of the copy, which is decoded; `_unchanged` checks that the original did not change.
        with self._local_file() as file, RunningDigest(file) as digest, closing(open_source(file, pick)) as slide:
            mpp = self.options.mpp_of(slide, self.row)
            given_mpp = None if mpp.origin == "file" else mpp.um[0]
            identity = {
                "parameters": self.options.parameters(self.name) | {"given_mpp": given_mpp},
                **stamp.to_json(self.secret),
            }
            attributes = self._published_before(identity)
            if attributes is None:
                attributes = self._written(slide, mpp, identity, lambda: _unchanged(self.source, stamp, digest))
        return facts_of(attributes, self.name, self._source_path)

    def _local_file(self) -> AbstractContextManager[Path]:
        """Context that yields the slide's file, or its copy on a local disk."""
        return nullcontext(self.source) if self.options.cache is None else staged(self.source, self.options.cache)

    def _written(
        self, slide: SlideSource, mpp: SourceMpp, identity: dict[str, Any], digest: Callable[[], str]
    ) -> dict[str, Any]:
        """Write the slide; return its `hyfi` attributes.

        Args:
            slide: Open for reading.
            mpp: Microns per pixel of its finest level.
            identity: Attributes by which a later run recognises the slide.
            digest: Returns the digest of the file, after it was read.
        """
        tissue = self.options.tissue_of(self.name)
        content = content_of(slide, mpp, self.options, tissue)
        if content.kind == "resampled":
            may_be_small = self.options.glass == "blank" or not self.options.pixel_codec.exact
            require_room(working_folder(self.store, self.options.cache), 0 if may_be_small else content.frame.box.area)
        with SlideWriter(
            self.store,
            self.name,
            content.levels,
            tissue=content.tissue_to_keep,
            identity={**identity, "versions": versions()},
            threads=self.threads,
            scratch=self.options.cache,
        ) as writer:
            quality = content.write(writer, self.progress)
            attributes = {
                "kind": content.kind,
                **provenance(slide, mpp, content.frame),
                "icc": self.options.icc if slide.icc else None,
                **quality.to_json(),
                "bad_tiles": content.bad_tiles,
                "tiles": content.tiles,
                **identity,
                "sha256": digest(),
                "versions": versions(),
            }
            replaced = mpp.origin != "file" and bool(slide.mpp or slide.facts.mpp_doubt)
            circumstances = {
                "mpp_assumed": mpp.origin in ("flag", "magnification"),
                "mpp_replaced": replaced,
                "upsampled": content.frame.choice.upsampled,
                "truncated": is_truncated(self.source),
                "tissue_given": tissue is not None,
            }
            flags = quality.flags | circumstances | {"bad_tiles": content.bad_tiles > 0}
            flags |= {note.flag: True for note in slide.facts.notes}
            attributes["flags"] = [name for name, applies in flags.items() if applies]
            # ``progress`` checks the claim, at the last moment before the slide gets its name.
            self.progress(1.0)
            writer.publish(attributes)
        return attributes

    def _published_before(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        """Return the attributes of the slide if a run published it, but crashed before saving the record; else None."""
        path = slide_path(self.store, self.name)
        if record_path(self.store, self.name).exists() or not path.exists():
            return None
        with suppress(StoreError):
            attributes = SlideStore.open(path).attributes
            is_whole = digest_of_group(read_json(path / "zarr.json")) == attributes.get("metadata_sha256")
            if is_whole and all(attributes.get(key) == value for key, value in identity.items()):
                return attributes
        return None


def _unchanged(source: Path, stamp: SourceStamp, digest: RunningDigest) -> str:
    """Return the digest of the slide's files, after checking that they still have ``stamp``.

    Raises:
        SlideError: They changed during reading.
    """
    after = digest.result()
    if SourceStamp.of(source) != stamp:
        raise SlideError("the file changed while it was read; ingest it again")
    return after


def _concerns_store(error: OSError, store: Path, cache: Path | None) -> bool:
    """Whether an error is one of the store's disk, not of reading the slide."""
    if error.errno in _CONCERNS_ALL:
        return True
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str)]
    roots = (str(store.absolute()), str(working_folder(store, cache).absolute()))
    # By the path in the error: both disks raise the same errors. With a slash: `store-slides` is not in `store`.
    below = tuple(f"{root.rstrip('/')}/" for root in roots)
    paths = [str(location(name).absolute()) for name in names]
    return any(path in roots or path.startswith(below) for path in paths)
