"""One slide as an OME-Zarr image: written, read, verified, exported."""
