"""What is served by name: which files requests may load, and the models that a server has at a time. Plain Python, no torch."""
