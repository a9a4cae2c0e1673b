"""Folders of features of tiles: those of ``hyfi features``, TRIDENT, CLAM and STAMP."""
