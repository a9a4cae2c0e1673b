"""The YAML configuration of a run: sections, keys, defaults, checks."""
