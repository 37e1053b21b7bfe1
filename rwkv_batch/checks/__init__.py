"""Checks of a model that runs: what it expects next, what it writes, how fast, LAMBADA, and whether it says the same twice."""
