"""Built-in classifiers in plain PyTorch."""
