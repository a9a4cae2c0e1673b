"""Evidence by occlusion: how much the outputs of a model drop when a block of the slide is covered."""
