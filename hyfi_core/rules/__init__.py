"""One operator, one rule: what it does to a layout."""
