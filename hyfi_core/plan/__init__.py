"""Where things are: pure values, standard library only."""
