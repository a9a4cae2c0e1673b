"""Calls of a tile encoder: trials before the first step, the two passes of a step, vectors that stay in memory."""
