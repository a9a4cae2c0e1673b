"""Prediction of slides: probabilities, heatmaps, regions, reports. The package can be called, too."""

from pathology.scripts import make_callable, predict

make_callable(__name__, predict)
