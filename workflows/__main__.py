"""``python -m workflows`` and the program ``hyfi``: installs signal handlers, then runs the command line."""

from __future__ import annotations

import os
import sys

from workflows import signals


def main() -> None:
    """Run the command line; never returns."""
    signals.listen_from_start()  # first: a signal before this ends the process without a word
    from data.children import import_safely, open_closed_streams
    from hyfi_core.collection import start_quickly

    open_closed_streams()
    import_safely()
    start_quickly()
    from workflows.cli import app

    try:
        app()
    except OSError as error:
        # Of texts such as --help, which have no file name; commands report their own errors.
        if error.filename is not None:
            raise
        # Python would try once more at its end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"hyfi: standard output cannot be written ({error.strerror})", file=sys.stderr)
        sys.exit(70)


if __name__ == "__main__":
    main()
