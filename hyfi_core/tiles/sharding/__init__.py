"""Weights of an encoder divided among the ranks that share tiles, by FSDP2 (``torch.distributed.fsdp``)."""
