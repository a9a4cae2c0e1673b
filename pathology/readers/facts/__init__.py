"""What a slide's file says about itself, where it says so, and what is believed of it."""
