"""Messages between the HTTP processes and the engine process."""
