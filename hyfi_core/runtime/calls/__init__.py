"""What surrounds the calls of an engine: its runners, and checks of how it and the user's module are used."""
