"""Calls of an encoder of tiles: what is known of it, the two passes of a step, vectors that are kept."""
