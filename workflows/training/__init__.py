"""Training: the job, the loop, and what it writes."""
