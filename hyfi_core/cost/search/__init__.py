"""The search for plans: the family, bounds, cuts that fit, and the fastest of them."""
