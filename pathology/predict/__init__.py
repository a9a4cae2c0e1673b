"""A checkpoint reads new slides: predictions, heatmaps, regions, reports."""
