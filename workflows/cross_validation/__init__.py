"""Cross-validation: a run for each fold, each evaluated on slides that chose nothing, and all of them together."""
