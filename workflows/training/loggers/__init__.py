"""Where a run records its metrics besides its own files: TensorBoard, MLflow, Weights & Biases."""
