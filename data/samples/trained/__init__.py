"""What a checkpoint says about the slides that its model was trained on."""
