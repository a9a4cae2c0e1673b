"""The kinds of a run: what it trains, and whether slides are whole images, bags of tiles, or bags of features."""
