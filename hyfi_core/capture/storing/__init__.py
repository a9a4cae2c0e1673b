"""What a forward stores while it is captured, in the model and outside of it."""
