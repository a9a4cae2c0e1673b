"""What labs predict of a slide: one record for each task, which everything else asks."""
