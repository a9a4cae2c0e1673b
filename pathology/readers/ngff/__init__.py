"""OME-Zarr (NGFF) stores as slides: those of other programs, versions 0.1 to 0.5, and our own."""
