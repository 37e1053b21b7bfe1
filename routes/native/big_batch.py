"""POST /big_batch/completions and its relatives: many rows, one plain sampler, always a stream."""

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from routes.http.context import RequestContext
from routes.http.replies import JSON, Response, json_reply
from routes.http.streams import Reply
from routes.native.chat import NATIVE_ID, reply_to, templated
from routes.schemas import ContentsBody, Messages
from rwkv_batch.text import prompts
from sampling.params import SamplingParams

PATH = "/big_batch/completions"


class Chat(BaseModel):
    """One conversation of `chats`."""

    model_config = ConfigDict(extra="ignore")

    messages: Messages
    system: str | None = None


class BigBatchBody(ContentsBody):
    """Raw prompts, or conversations that are given the chat template.

    Of the sampling fields only temperature is read, and noise when it was sent.
    """

    filtered: ClassVar[bool] = False
    chats: Annotated[list[Chat], Field(fail_fast=True)] = Field(default_factory=list)

    @property
    def field(self) -> str:
        """Where the prompts are; `contents` wins."""
        return "contents" if self.contents or not self.chats else "chats"

    def texts(self) -> list[str]:
        """The raw prompts, or one prompt for each conversation."""
        tail = prompts.chat_tail(think=self.enable_think)
        if self.field == "contents":
            return self.contents
        return [templated(turns(chat), tail, f"chats[{index}].messages", self.gap) for index, chat in enumerate(self.chats)]

    def sampling(self) -> SamplingParams:
        """Exact sampling at `temperature`; with noise the largest of logits/T + U(0, noise)."""
        sent = "noise" in self.model_fields_set
        return SamplingParams(
            rule="noise" if sent else "gumbel",
            temperature=self.temperature,
            noise=self.noise if sent else 0.0,
            alpha_presence=0.0,
            alpha_frequency=0.0,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )


def turns(chat: Chat) -> list[prompts.Turn]:
    """A conversation for the template."""
    system = [prompts.Turn("system", chat.system)] if chat.system else []
    return [*system, *(message.turn() for message in chat.messages)]


async def completions(context: RequestContext) -> Reply:
    """Stream, whatever `stream` says; one document for a client that wants JSON and nothing else."""
    context.body["stream"] = not wants_json(context)
    return await reply_to(context, BigBatchBody, NATIVE_ID)


def wants_json(context: RequestContext) -> bool:
    """Whether the Accept header names JSON and neither a stream nor everything, as libraries do by habit."""
    accepted = (context.headers.get("accept") or "").lower()
    return JSON in accepted and "text/event-stream" not in accepted and "*/*" not in accepted


async def completions_status(context: RequestContext) -> Response:
    """Whether a big batch is running, in any HTTP process."""
    return json_reply({"generating": bool(await context.app.ask(endpoint=PATH))})


async def clean(context: RequestContext) -> Response:
    """Cancel all big batches."""
    await context.app.ask(endpoint=PATH, stop=True)
    return json_reply({"generating": False, "cleaned": True})
