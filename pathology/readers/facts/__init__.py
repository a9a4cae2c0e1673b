"""What a slide's file says about itself, where it says so, and which of it is believed."""
