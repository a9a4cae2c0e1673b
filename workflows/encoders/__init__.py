"""Encoders of tiles: loaded from local files by name, with the normalisation that they were trained with."""
