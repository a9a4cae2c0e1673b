"""Stores, manifests, labels, views and loaders: arrays with a case behind them, not yet slides."""
