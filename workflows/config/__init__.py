"""The YAML of a run: its sections, keys, defaults and checks."""
