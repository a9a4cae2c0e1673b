"""The tasks: what is predicted of a slide. Training, validation, prediction and pages ask one class for each task."""
