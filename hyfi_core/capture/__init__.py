"""The user's module becomes a program."""
