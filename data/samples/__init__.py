"""Labels, splits, and the training images made from slides."""
