"""One module for each command of `hyfi`."""
