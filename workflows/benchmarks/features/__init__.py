"""Features of tissue tiles beside a plain loop of the encoder."""
