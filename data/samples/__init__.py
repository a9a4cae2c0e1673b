"""Which slides are learned from, and the training image that each becomes."""
