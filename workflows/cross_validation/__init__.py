"""Cross-validation: a run for each fold, evaluated on slides that neither trained nor chose it, and pooled results."""
