"""Trained models for use elsewhere: weights with a script, ONNX, and a card that says what the model is."""
