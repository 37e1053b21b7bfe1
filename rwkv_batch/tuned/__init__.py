"""Tuned states: initial states that were trained. Their files, and those that an engine has loaded."""
