"""Calls and answers over HTTP; the only room that knows Robyn."""
