"""A child of a validator that dies whenever it is given work."""

from __future__ import annotations

import os

from workflows.launch.child_process import Parent


def main() -> None:
    parent = Parent.from_arguments()
    seat = parent.receive()["rendezvous"]
    if seat["size"] > 1 and seat["rank"] == 0:
        parent.send("port", port=1)
    parent.send("ready")
    parent.receive()
    os._exit(9)


if __name__ == "__main__":
    main()
