"""Check of a GPU machine: equality with plain PyTorch, tests, speed and memory, in a few minutes."""
