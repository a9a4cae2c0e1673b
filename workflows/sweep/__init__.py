"""``hyfi sweep``: runs with several settings; validation chooses one."""
