"""What stages hold in memory, and how plans are made to fit: by recomputation, and by cuts at other places."""
