"""Rules of operators that put pixels in other places."""
