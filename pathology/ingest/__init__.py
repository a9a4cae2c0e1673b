"""Ingest of slides into a store. The package can be called: ``pathology.ingest(paths, store)``."""

from pathology.scripts import ingest, make_callable

make_callable(__name__, ingest)
