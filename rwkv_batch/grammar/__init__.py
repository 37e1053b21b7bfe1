"""From a grammar to the tokens that may follow: llguidance behind a door, and a process in which a hostile one hurts nobody."""
