"""One HTTP call as the routes see it, and what a route is."""

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from routes.http.access import OWNER, Headers
from routes.http.replies import Form
from routes.http.streams import Reply
from rwkv_batch.config import Config
from rwkv_batch.ipc.tickets import Ticket

if TYPE_CHECKING:
    from routes.http.http_app import HttpApp
    from routes.http.served import ServedModel


@dataclass
class RequestContext:
    """One HTTP call as the routes see it.

    body   parsed JSON of a POST, checked for depth only; where a file is posted, what the URL gives behind ?
    body_bytes  size of that JSON as it came
    file   the bytes of that file
    peer   address it came from, "" when that is not known
    token  what the URL gives as ?token=
    params what the path gives, by the names in the table of routes
    form   which form its errors have
    caller name of the API key it came with, else OWNER
    given_id the caller's own X-Request-Id, "" without one
    """

    app: "HttpApp"
    method: str
    path: str
    headers: Headers
    peer: str = ""
    token: str | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    body: dict[str, Any] = field(default_factory=dict)
    body_bytes: int = 0
    file: bytes = b""
    params: dict[str, str] = field(default_factory=dict)
    form: Form = "native"
    caller: str = OWNER
    given_id: str = ""
    began: float = field(default_factory=time.monotonic)
    status: int = 200
    num_prompts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ticket: Ticket | None = None
    failed: bool = False  # after its answer had begun
    found_model: "ServedModel | None" = None

    @property
    def config(self) -> Config:
        """The process's settings."""
        return self.app.config

    @property
    def model(self) -> "ServedModel":
        """The model that the body names, and that the call keeps to. Raises NotFound where there are several and it is none."""
        if self.found_model is None:
            self.found_model = self.app.models.find(self.body.get("model"), self.id)
        return self.found_model

    @property
    def model_name(self) -> str:
        """The name of that model."""
        return self.model.name

    @property
    def namespace(self) -> str:
        """Whose sessions and cached prefixes are used; that of the password is ""."""
        return self.caller if self.config.isolate else ""


# admin: not with an API key; translate: open to this host, or to all by --open-translate
Access = Literal["password", "admin", "open", "translate"]
FormOf = Callable[[dict[str, Any] | str | bytes], Form]  # where the body decides, which may be one that could not be parsed
Handler = Callable[[RequestContext], Awaitable[Reply]]
