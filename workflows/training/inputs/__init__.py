"""What a run trains with, and what it reads of its slides: whole images, bags of tiles, or bags of features."""
