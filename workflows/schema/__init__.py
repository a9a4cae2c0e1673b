"""The shape of a run's YAML: its sections, keys, defaults and what each may hold; a file for each few sections."""
