"""How plans are made to fit into memory: by recomputation, and by cuts at other places."""
