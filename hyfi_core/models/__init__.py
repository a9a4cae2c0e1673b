"""Plain PyTorch classifiers; nothing parallel in them."""
