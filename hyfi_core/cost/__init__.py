"""Cost models of a program: time and memory."""
