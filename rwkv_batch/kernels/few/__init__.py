"""Decode steps of few rows, in fewer launches."""
