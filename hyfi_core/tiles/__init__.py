"""Slides as bags of tiles: an encoder and an aggregator trained together, exactly, over all tiles of a slide."""
