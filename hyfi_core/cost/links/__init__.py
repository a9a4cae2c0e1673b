"""Links between devices and nodes: what a plan sends over them, and in what time."""
