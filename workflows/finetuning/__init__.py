"""Fine-tuning: weights from a file, what stays frozen, and the learning rate of each parameter."""
