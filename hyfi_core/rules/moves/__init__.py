"""Rules of operators that move pixels."""
