"""Connected components of masks, by several libraries."""
