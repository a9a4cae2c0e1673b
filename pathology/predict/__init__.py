"""Prediction of slides: probabilities, heatmaps, regions, reports."""
