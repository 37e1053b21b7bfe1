"""Text to tokens and back, and what a conversation becomes: the routes that tools look for beside the OpenAI ones."""

from pydantic import Field

from routes.openai_answers import Vocabulary
from routes.openai_schemas import END_IDS, END_TEXT, Conversation, read
from routes.reply import Call, Plain, json_reply
from routes.schemas import Body, Ids
from rwkv_batch.errors import InvalidRequest


class TokenizeBody(Body, Conversation):
    """A text as `prompt`, or as `content`, llama.cpp's name for it; or messages, which get the chat template."""

    prompt: str | None = None
    content: str | None = None
    return_token_strs: bool = False

    def text(self) -> str:
        """The text. Raises InvalidRequest when there is none."""
        given = self.prompt if self.prompt is not None else self.content
        if given is None and not self.messages:
            raise InvalidRequest("prompt: a text, or messages", param="prompt")
        return self.templated() if given is None else given


class DetokenizeBody(Body):
    """Ids."""

    tokens: Ids = Field(default_factory=list)


class TemplateBody(Body, Conversation):
    """A conversation."""


async def tokenize(call: Call) -> Plain:
    """POST tokenize: the ids of a text; of the end token's own text, that id."""
    body = read(TokenizeBody, call.body)
    text = body.text()
    ids = END_IDS if text == END_TEXT else []
    if text and not ids:
        (ids,) = await call.site.encode([text], "prompt")
    answer = {"count": len(ids), "max_model_len": call.config.max_prompt_tokens, "tokens": ids, "token_strs": None}
    if body.return_token_strs:
        vocabulary = Vocabulary((await call.site.loaded_tokenizer()).token_bytes)
        answer["token_strs"] = [vocabulary.name(token) for token in ids]
    return json_reply(answer)


async def detokenize(call: Call) -> Plain:
    """POST detokenize: the text of ids."""
    ids = read(DetokenizeBody, call.body).tokens
    if len(ids) > call.config.max_prompt_tokens:
        raise InvalidRequest(f"tokens: at most {call.config.max_prompt_tokens}", param="tokens")
    text = END_TEXT if ids == END_IDS else (await call.site.loaded_tokenizer()).decode(ids)
    return json_reply({"prompt": text, "content": text})


async def tokenizer_info(call: Call) -> Plain:
    """GET tokenizer_info: what evaluation tools ask first."""
    tokenizer = await call.site.loaded_tokenizer()
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
        }
    )


async def apply_template(call: Call) -> Plain:
    """POST apply_template: the prompt that a conversation becomes."""
    return json_reply({"prompt": read(TemplateBody, call.body).templated()})
