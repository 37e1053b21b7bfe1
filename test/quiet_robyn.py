"""Imports Robyn as app.py does: with an argv of its own, because it parses sys.argv when it is imported."""

import sys
from unittest import mock

with mock.patch.object(sys, "argv", ["test", "--disable-openapi"]):
    import robyn  # noqa: F401
