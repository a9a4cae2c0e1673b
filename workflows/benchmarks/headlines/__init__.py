"""Published speed-ups, throughputs and bubbles compared with forecasts of the machine model."""
