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
        # While a text such as --help is printed: it names no file. Commands report their own errors.
        if error.filename is not None:
            raise
        # To the null device: at its end, Python would write the text once more, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"hyfi: standard output cannot be written ({error.strerror})", file=sys.stderr)
        sys.exit(70)


if __name__ == "__main__":
    main()
