"""Launch, engine, executor, gradients, checkpoints."""
