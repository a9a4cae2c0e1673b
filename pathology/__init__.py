"""Slides: read, ingest, predict, report."""
