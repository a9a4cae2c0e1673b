"""Several targets of one model, each with a task of its own."""
