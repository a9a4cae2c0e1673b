"""The command line and what it runs: commands, configuration, training, evaluation, launchers."""
