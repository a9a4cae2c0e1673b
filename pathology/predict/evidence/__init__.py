"""Evidence of any model of images: how much its outputs drop without a block, measured or estimated by gradients."""
