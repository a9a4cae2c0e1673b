"""Published speed-ups, throughputs and bubbles against what the machine model says of the same plans."""
