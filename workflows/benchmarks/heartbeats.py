"""Benchmark of heartbeats: the time that a rank's heartbeats cost its training.

    python -m workflows.benchmarks.heartbeats [--rounds 8] [--rate 200]

Steps of a small network with and without heartbeats alternate. A run beats once a second, which cannot be measured;
here a thread makes and sends ``--rate`` of them a second to a child process. Prints one JSON line, with the cost of one
heartbeat and the ratio of steps with one a second to steps without.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple

import torch

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.supervision.heartbeat import Heart
from hyfi_core.models.resnet import resnet10

SIZE_PX, WIDTH, STEPS = 64, 8, 20


@contextmanager
def heartbeats(rate: float) -> Iterator[None]:
    """Context in which a thread sends ``rate`` heartbeats a second to a child process that reads them."""
    mine, peer = socket.socketpair()
    # A child reads what is sent: a full socket would block the sending thread.
    reader = os.fork()
    if not reader:
        mine.close()
        while peer.recv(65536):
            pass
        os._exit(0)
    # The reader ends when all other ends are closed.
    peer.close()
    heart, ends = Heart(), threading.Event()

    def beat() -> None:
        while not ends.wait(1 / rate):
            mine.sendall(json.dumps([*astuple(heart.beat())]).encode())

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        mine.close()
        os.waitpid(reader, 0)


def main(argv: Sequence[str] | None = None) -> None:
    """Time steps with and without heartbeats; print both and the time that one heartbeat costs as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rate", type=float, default=200.0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    engine = hyfi_core.parallelize(
        resnet10(2, width=WIDTH),
        (1, 3, SIZE_PX, SIZE_PX),
        hyfi_core.ParallelPlan(grids=((1, 1),)),
        AloneCommunicator(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
    images, labels = torch.randn(1, 3, SIZE_PX, SIZE_PX), torch.tensor([1])

    def step_s() -> float:
        began_s = time.perf_counter()
        engine.train_step(images, labels)
        return time.perf_counter() - began_s

    step_s(), step_s()
    without, with_beats = list[float](), list[float]()
    for _ in range(args.rounds):
        without += [step_s() for _ in range(STEPS)]
        with heartbeats(args.rate):
            with_beats += [step_s() for _ in range(STEPS)]
    plain_s, beaten_s = statistics.median(without), statistics.median(with_beats)
    # During a step of `beaten_s` seconds, rate · beaten_s heartbeats are sent.
    beat_s = (beaten_s - plain_s) / (args.rate * beaten_s)
    print(
        json.dumps(
            {
                "step_s": plain_s,
                "step_with_beats_s": beaten_s,
                "beats_per_s": args.rate,
                "beat_s": beat_s,
                "ratio_at_one_a_second": 1 + beat_s,
            }
        )
    )


if __name__ == "__main__":
    main()
