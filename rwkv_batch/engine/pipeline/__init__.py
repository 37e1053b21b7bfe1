"""One engine whose layers are on several devices: stages, what goes from one to the next, and how they are put together."""
