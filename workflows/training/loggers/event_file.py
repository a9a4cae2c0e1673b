"""Scalars as TensorBoard reads them: an event file, written without TensorBoard's seven packages.

A file is a sequence of records; a record is a message of Protocol Buffers between two checksums::

    length of the message, uint64 │ its CRC-32C, masked │ message │ its CRC-32C, masked

Format: TensorFlow, ``lib/io/record_writer`` and ``util/event.proto``.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from pathlib import Path

import google_crc32c

_VERSION = b"brain.Event:2"
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION_LOG = 1, 2, 3, 5, 7  # fields of Event
_VALUE, _TAG, _SIMPLE_VALUE, _STATUS, _START = 1, 1, 2, 1, 1
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # types on the wire
_MASK = 0xA282EAD8
_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
"""Largest number of float32, the type of values in the format."""


class EventFile:
    """A new event file in a folder, which is created if it does not exist.

    Args:
        folder: The folder that TensorBoard reads.
        start: The step after which the run begins or continues: TensorBoard hides later steps of earlier files.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, folder: Path, start: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files of a folder in the order of names, so the time comes first, with leading zeros.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        # "x": never an existing file, whose reader has its own position in it.
        self._file = (folder / name).open("xb")
        # Without this version, a reader guesses from falling steps where a run was resumed, and ignores the start
        # below.
        self._write(0, _field(_FILE_VERSION, _VERSION))
        # START makes TensorBoard drop this step and later ones of earlier files: this run writes them again. A new run
        # writes START 1, because a run that was killed before its first checkpoint begins again in the same folder.
        self._write(start + 1, _field(_SESSION_LOG, _number(_STATUS, _START)))

    def add(self, tag: str, value: float, step: int) -> None:
        """Append the value of a step; one beyond the range of float32 becomes an infinity."""
        # `struct` would raise OverflowError, and a chart is no reason to end a run.
        single = value if abs(value) <= _LARGEST_FLOAT or math.isnan(value) else math.copysign(math.inf, value)
        scalar = _field(_TAG, tag.encode()) + _key(_SIMPLE_VALUE, _FLOAT) + struct.pack("<f", single)
        self._write(step, _field(_SUMMARY, _field(_VALUE, scalar)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, step: int, content: bytes) -> None:
        """Append one record in TensorBoard's format: length, its checksum, event, its checksum."""
        time_s = _key(_WALL_TIME, _DOUBLE) + struct.pack("<d", time.time())
        event = time_s + _number(_STEP, step) + content
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))
        # Flushed after each record, so that readers see it at once, and a killed run loses none.
        self._file.flush()


def _key(number: int, kind: int) -> bytes:
    # The low three bits are the type on the wire.
    return _varint(number << 3 | kind)


def _number(number: int, value: int) -> bytes:
    return _key(number, _VARINT) + _varint(value)


def _field(number: int, content: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Return seven bits in each byte, the lowest first; the highest bit says that another byte follows."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _checksum(content: bytes) -> bytes:
    crc: int = google_crc32c.value(content)
    # The mask of TFRecord, rotated and offset, because the CRC of bytes followed by their own CRC is a constant.
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)
