"""The loader service: samples are decoded ahead of time and sent to the ranks that train on them."""
