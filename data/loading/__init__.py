"""The loader service: decodes samples ahead of time and sends them to the ranks that train on them."""
