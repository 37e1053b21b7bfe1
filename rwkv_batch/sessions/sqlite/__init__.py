"""Sessions in an SQLite file."""
