"""The server's own processes: the supervisor, its children, and the engine's process. Knows nothing of HTTP."""
