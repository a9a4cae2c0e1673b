"""Bytes between ranks, no autograd."""
