"""The loop that steps the model, and what a step is made of."""
