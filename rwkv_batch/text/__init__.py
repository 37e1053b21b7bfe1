"""Between texts and tokens. Plain Python: no torch."""
