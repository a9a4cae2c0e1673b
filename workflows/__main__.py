"""``python -m workflows`` and the program ``hyfi``: installs signal handlers, then runs the command line."""

from __future__ import annotations

from data.children import import_safely, open_closed_streams
from workflows import signals


def main() -> None:
    """Run the command line; never returns."""
    signals.listen_from_start()
    open_closed_streams()
    import_safely()
    from workflows.cli import app

    app()


if __name__ == "__main__":
    main()
