"""What all ranks must have alike: requests, models, weights, and files that they rely on."""
