from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from workflows.launch.processes import ExitOrder


def _wait_until_dead(pid: int) -> None:
    """Return when a process has ended, which its parent does not know yet."""
    while ") Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.005)


def test_ends_are_in_order_but_for_those_before_they_were_watched() -> None:
    early = [subprocess.Popen(["true"]) for _ in range(2)]
    late = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    for process in early:
        _wait_until_dead(process.pid)
    gone = subprocess.Popen(["true"])
    gone.wait()
    order, pids = ExitOrder(), [process.pid for process in (*early, *late, gone)]
    order.wait(pids, 0)
    unordered = {process.pid for process in (*early, gone)}
    assert set(order.pids) == order.unordered == unordered
    for process in reversed(late):
        os.kill(process.pid, 9)
        _wait_until_dead(process.pid)
    while len(order.pids) < len(pids):
        order.wait(pids, 1)
    assert order.pids[3:] == [process.pid for process in reversed(late)]
    assert order.unordered == unordered
    order.close()
    for process in (*early, *late):
        process.wait()
