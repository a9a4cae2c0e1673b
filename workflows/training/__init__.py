"""Training: job, loop, output."""
