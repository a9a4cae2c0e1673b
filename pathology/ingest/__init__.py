"""Ingest of slides into a store."""
