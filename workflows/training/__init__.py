"""The parts of `hyfi train`: its job, its loop, what it writes."""
