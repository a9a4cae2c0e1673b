"""What the model is: capture, program, rules."""
