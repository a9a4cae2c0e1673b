"""Trained models for use elsewhere: weights with a script, or an ONNX, pt2 or TorchScript file, with a model card."""
