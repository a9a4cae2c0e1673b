"""What a run trains with, and what it reads of its slides: whole images, or bags of tiles."""
