"""Which rows run next, and with which tokens. Plain Python: no torch."""
