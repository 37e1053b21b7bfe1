"""The command `batch`: the lines of a file as requests of the OpenAI routes, their answers into another file. Without HTTP."""
