"""The time of one step of a plan: its stages, its schedule, and what disturbs them."""
