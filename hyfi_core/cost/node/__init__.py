"""What ranks of one node share: cores, and memory that processes keep."""
