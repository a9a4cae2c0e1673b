"""A deep-zoom page about slides, on this machine alone: slide, tissue, heatmaps, regions, annotations."""
