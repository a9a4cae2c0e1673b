"""What a rank does about the failures of others and its own."""
