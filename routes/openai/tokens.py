"""Text to tokens and back, and what a conversation becomes: the routes that tools look for beside the OpenAI ones."""

from typing import Any

from pydantic import Field, model_validator

from routes.http.context import RequestContext
from routes.http.off_loop import off_loop
from routes.http.replies import Response, json_reply
from routes.openai.answers import Vocabulary
from routes.openai.conversation import Conversation
from routes.openai.schemas import read, split_ends
from routes.schemas import END_ID, Body, Ids
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.text.chat_template import CHAT_TEMPLATE
from rwkv_batch.text.tokenizer import END_TEXT


class TokenizeBody(Body, Conversation):
    """A text as `prompt`, or as `content`, llama.cpp's name for it; or messages, which get the chat template.

    lm-evaluation-harness sends messages as `prompt` too.
    """

    prompt: str | None = None
    content: str | None = None
    return_token_strs: bool = False

    @model_validator(mode="before")
    @classmethod
    def take_messages(cls, data: Any) -> Any:
        """A prompt that is a list holds messages."""
        if not isinstance(data, dict) or not isinstance(data.get("prompt"), list):
            return data
        return {key: value for key, value in data.items() if key != "prompt"} | {"messages": data["prompt"]}

    def text(self) -> tuple[list[int], str]:
        """End tokens, which raw texts alone can begin with, and the text. Raises InvalidRequest when there is none."""
        given = self.prompt if self.prompt is not None else self.content
        if given is None and not self.messages:
            raise InvalidRequest("prompt: a text, or messages", param="prompt")
        return ([], self.templated()) if given is None else split_ends(given)


class DetokenizeBody(Body):
    """Ids."""

    tokens: Ids = Field(default_factory=list)


class TemplateBody(Body, Conversation):
    """A conversation."""


async def tokenize(context: RequestContext) -> Response:
    """POST tokenize: the ids of a text, as completions would be fed it."""
    body = read(TokenizeBody, context.body).of_model(context.model.entry.defaults)
    ids, text = await off_loop(context.body_bytes, body.text)
    if text:
        ids += (await context.app.encode(context, [text], "prompt"))[0]
    if len(ids) > context.config.max_prompt_tokens:
        raise InvalidRequest(f"prompt: at most {context.config.max_prompt_tokens} tokens", param="prompt")
    answer = {"count": len(ids), "max_model_len": context.config.max_prompt_tokens, "tokens": ids, "token_strs": None}
    if body.return_token_strs:
        vocabulary = Vocabulary((await context.app.loaded_tokenizer(context.model)).token_bytes)
        answer["token_strs"] = [vocabulary.name(token) for token in ids]
    return json_reply(answer)


async def detokenize(context: RequestContext) -> Response:
    """POST detokenize: the text of ids, in which the end token is spelled out."""
    ids = read(DetokenizeBody, context.body).tokens
    if len(ids) > context.config.max_prompt_tokens:
        raise InvalidRequest(f"tokens: at most {context.config.max_prompt_tokens}", param="tokens")
    pieces: list[list[int]] = [[]]
    for token in ids:
        if token == END_ID:
            pieces.append([])
        else:
            pieces[-1].append(token)
    text = END_TEXT.join(map((await context.app.loaded_tokenizer(context.model)).decode, pieces))
    return json_reply({"prompt": text, "content": text})


async def tokenizer_info(context: RequestContext) -> Response:
    """GET tokenizer_info: what evaluation tools ask first."""
    tokenizer = await context.app.loaded_tokenizer(context.model)
    return json_reply(
        {
            "tokenizer_class": f"RWKV {tokenizer.name}",
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": tokenizer.fingerprint,
            "eos_token": END_TEXT,
            "eos_token_id": 0,
            "bos_token": END_TEXT,
            "bos_token_id": 0,
            "pad_token": END_TEXT,
            "pad_token_id": 0,
            "chat_template": CHAT_TEMPLATE,
        }
    )


async def apply_template(context: RequestContext) -> Response:
    """POST apply_template: the prompt that a conversation becomes."""
    prompt = await off_loop(
        context.body_bytes, read(TemplateBody, context.body).of_model(context.model.entry.defaults).templated
    )
    return json_reply({"prompt": prompt})
