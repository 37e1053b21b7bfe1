"""A model behind the URL of a running server."""

import contextlib
import http.client
import json
import time
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from rwkv_batch.checks.target import Likely, Scored, Written
from rwkv_batch.errors import EngineFailed, InvalidRequest, RwkvBatchError, UsageError
from rwkv_batch.text.tokenizer import Tokenizer, for_vocab

SILENCE = 120.0  # seconds without a byte; an answer that takes long sends blanks meanwhile
MAX_ERROR = 500  # characters of a server's message


class RemoteTarget:
    """See Target. A model that is not named is the first of the server's list."""

    def __init__(self, url: str, password: str | None = None, model: str | None = None):
        self._parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            known = self._parts.scheme in ("http", "https") and self._parts.hostname and self._parts.port != 0
        except ValueError:
            known = False
        if not known:
            raise UsageError("--url: wants http://HOST:PORT")
        self.place = f"{self._parts.scheme}://{self._parts.netloc.rpartition('@')[2]}"
        self._base = self._parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if password:
            self._headers["Authorization"] = f"Bearer {password}"
        self.model = model or self._call("/v1/models")["data"][0]["id"]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """See Target."""
        info = self._call("/tokenizer_info")
        tokenizer = for_vocab(info["vocab_size"])
        if info.get("fingerprint") != tokenizer.fingerprint:
            raise EngineFailed(f"{self.place}: its vocabulary is not the one known here")
        return tokenizer

    def likely(self, prompts: list[str], top: int) -> list[list[Likely]]:
        """See Target."""
        choices = self._complete({"prompt": prompts, "max_tokens": 1, "logprobs": top, **_plain(None)})
        found = [choice["logprobs"]["top_logprobs"][0].items() for choice in choices]
        return [sorted((Likely(*pair) for pair in tokens), key=lambda token: -token.logprob)[:top] for tokens in found]

    def write(self, prompts: list[str], *, max_tokens: int, noise: float, seed: int, stops: list[str]) -> Written:
        """See Target."""
        body = {"model": self.model, "prompts": prompts, "max_tokens": max_tokens}
        body |= {"temperature": 1, "noise": noise, "seed": seed}
        began = time.monotonic()
        answer = self._call("/v1/batch/completions", {**body, "stop_tokens": stops, "use_prefix_cache": False})
        seconds = time.monotonic() - began
        results = answer["results"]
        reasons = [result["finish_reason"] for result in results]
        return Written([result["text"] for result in results], reasons, answer["usage"]["completion_tokens"], seconds)

    def draw(self, prompts: list[str], *, max_tokens: int, seed: int | None) -> list[list[str]]:
        """See Target."""
        choices = self._complete({"prompt": prompts, "max_tokens": max_tokens, "logprobs": 0, **_plain(seed)})
        return [choice["logprobs"]["tokens"] for choice in choices]

    def score(self, rows: list[list[int]]) -> list[list[Scored]]:
        """See Target."""
        found = []
        for choice in self._complete({"prompt": rows, "max_tokens": 0, "echo": True, "logprobs": 1}):
            given, top = choice["logprobs"]["token_logprobs"][1:], choice["logprobs"]["top_logprobs"][1:]
            found.append([Scored(own, own >= max(known.values())) for own, known in zip(given, top, strict=True)])
        return found

    def close(self) -> None:
        """See Target."""

    def _complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self._call("/v1/completions", {"model": self.model, "use_prefix_cache": False, **body})
        return sorted(answer["choices"], key=lambda choice: choice["index"])

    def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the server's document. Raises InvalidRequest where it refuses the call, EngineFailed where it fails."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        data = None if body is None else json.dumps(body).encode()
        try:
            with contextlib.closing(kind(self._parts.hostname, self._parts.port, timeout=SILENCE)) as connection:
                connection.request("GET" if body is None else "POST", self._base + path, data, self._headers)
                reply = connection.getresponse()
                status, text = reply.status, reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailed(f"{self.place}: {getattr(error, 'strerror', None) or error or type(error).__name__}") from None
        with contextlib.suppress(ValueError):
            document = json.loads(text)
            if status == 200 and isinstance(document, dict) and "error" not in document:
                return document
        raise self._refused(path, status, text)

    def _refused(self, path: str, status: int, text: bytes) -> RwkvBatchError:
        message = text.decode(errors="replace")
        with contextlib.suppress(ValueError, TypeError, KeyError):
            error = json.loads(text)["error"]
            message = error["message"] if isinstance(error, dict) else str(error)
        kind = InvalidRequest if 400 <= status < 500 else EngineFailed
        return kind(f"{self.place}{self._base}{path}: {status}: {' '.join(message.split())[:MAX_ERROR]}")


def _plain(seed: int | None) -> dict[str, Any]:
    """Draw from all tokens as likely as the model makes them; without a seed the likeliest."""
    return {"temperature": 0 if seed is None else 1, "top_k": 0, "top_p": 1, "seed": seed}
