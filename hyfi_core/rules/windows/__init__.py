"""Rules for operators that slide a window over maps: convolutions and pools."""
