"""The table of the OpenAI routes.

    python test/test_openai_routes.py                                          starts a server with the demo model
    BASE_URL=http://localhost:8000 PASSWORD=... python test/test_openai_routes.py

calls every route of a live server over plain HTTP; pytest looks at the table alone.
"""

import sys
from pathlib import Path

import pytest
import quiet_robyn  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from routes import ROUTES, admin, models
from routes.native import adapters, big_batch, tuned

TABLE = {(route.method, route.path): route for route in ROUTES}


@pytest.mark.parametrize("base", ["/v1", "/openai/v1"])
def test_both_bases_have_every_route(base):
    for method, path in (
        ("POST", "chat/completions"), ("POST", "completions"), ("POST", "embeddings"), ("POST", "responses"), ("GET", "models"),
        ("GET", "models/*model"), ("DELETE", "responses/:response"), ("POST", "responses/input_tokens"),
        ("POST", "tokenize"), ("POST", "detokenize"), ("GET", "tokenizer_info"), ("POST", "apply_template"), ("GET", "health"),
    ):  # fmt: skip
        assert TABLE[method, f"{base}/{path}"].form in ("openai", "chat")
    for method, path in (("POST", "tokenize"), ("POST", "detokenize"), ("GET", "tokenizer_info"), ("GET", "health")):
        assert TABLE[method, f"{base.removesuffix('/v1')}/{path}"].handler is TABLE[method, f"{base}/{path}"].handler


def test_no_path_is_there_twice():
    assert len(TABLE) == len(ROUTES)


def test_what_administers_needs_the_password():
    handlers = {admin.server_status, admin.server_stop, admin.figures, admin.stats, big_batch.clean}
    handlers |= {adapters.load_adapter, adapters.remove_adapter}
    handlers |= {models.load, models.remove, models.switch, tuned.load_state, tuned.load_mix, tuned.set_weights, tuned.remove}
    assert {route.handler for route in ROUTES if route.access == "admin"} == handlers


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent / "live"))
    import openai_checks

    sys.exit(openai_checks.main(openai_checks.ROUTES))
