"""What memory this process holds (Linux, proc(5))."""

from __future__ import annotations

from pathlib import Path


def peak_bytes() -> int:
    """Return the most that was resident since the process began, or since ``forget_peak``."""
    return _status_bytes("VmHWM")


def forget_peak() -> None:
    """Let the peak be what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}: this benchmark needs Linux")
