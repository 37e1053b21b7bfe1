"""Models that come and go while the server runs, as the supervisor sees them."""
