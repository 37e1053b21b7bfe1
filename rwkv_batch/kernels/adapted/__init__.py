"""Kernel ops for steps in which rows have adapters of their own."""
