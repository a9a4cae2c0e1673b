"""Cost of checking what slide files say about themselves."""
