"""Write, read, verify and export slides as OME-Zarr images."""
