"""What ranks that are threads of one process share: turns, waits, messages and collective calls."""
