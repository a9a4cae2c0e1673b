"""Prediction with an encoder of tiles and an aggregator: what each tile says, in register with the slide."""
