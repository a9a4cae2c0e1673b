"""What a checkpoint says of the slides that its model was trained on."""
