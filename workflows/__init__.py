"""What a user runs: commands, configuration, training, the demo."""
