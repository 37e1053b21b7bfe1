"""POST /translate/v1/batch-translate: what browser extensions ask for, paragraph by paragraph.

Every paragraph of every call is a row of the one continuous batch, greedy. What cannot be translated comes back as it was:
one text never costs the others theirs.
"""

import asyncio
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from routes.http.context import RequestContext
from routes.http.off_loop import off_loop
from routes.http.replies import Response, json_reply
from routes.http.streams import Reply
from routes.schemas import Body, Texts, validate
from rwkv_batch.errors import EngineFailed, InvalidRequest, RwkvBatchError
from rwkv_batch.request import Event, Failure, Request
from rwkv_batch.text import languages, prompts
from rwkv_batch.text.translation import Placeholders, split_all, token_limit
from sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, alpha_presence=0.0, alpha_frequency=0.0)
AUTO = "auto"
MAX_PARTS = 8  # paragraphs and gaps for each text that a call may have
MAX_PLACEHOLDER = 256  # characters of one
MAX_SEARCH = 2**26  # characters of texts times those of placeholders: a search that takes longer would hold up the process
OPENAI_BODY = (
    "this path takes source_lang, target_lang and text_list; for messages, the OpenAI form, the URL is /v1/chat/completions"
)


class TranslateBody(Body):
    """The extension's custom API. `placeholders` are texts that have to come back unchanged, beside {0} and <b0>.

    The first three names are what errors call the fields.
    """

    text_field: ClassVar[str] = "text_list"
    source_field: ClassVar[str] = "source_lang"
    target_field: ClassVar[str] = "target_lang"

    source_lang: str = Field(AUTO, max_length=64)
    target_lang: str = Field(max_length=64)
    text_list: Texts
    placeholders: list[Annotated[str, Field(max_length=MAX_PLACEHOLDER)]] = Field(default_factory=list, fail_fast=True)


class TextsBody(TranslateBody):
    """kiss-translator's own form."""

    text_field: ClassVar[str] = "texts"
    source_field: ClassVar[str] = "from"
    target_field: ClassVar[str] = "to"

    source_lang: str = Field(AUTO, max_length=64, alias="from")
    target_lang: str = Field(max_length=64, alias="to")
    text_list: Texts = Field(alias="texts")


class TextBody(TextsBody):
    """And that of its first version: a single text. Several are answered as `texts` are."""

    text_field: ClassVar[str] = "text"

    text_list: Texts = Field(alias="text")


class Paragraph(NamedTuple):
    """One thing to translate; languages are codes. Equal paragraphs are translated once."""

    text: str
    source: str
    target: str


async def batch_translate(context: RequestContext) -> Reply:
    """Translate a list of texts: as many come back, in the same order."""
    if "messages" in context.body and "text_list" not in context.body:
        raise InvalidRequest(OPENAI_BODY, param="messages")
    body = read(form_of(context.body), context.body)
    if len(body.text_list) > context.config.max_prompts:
        raise InvalidRequest(f"{body.text_field}: at most {context.config.max_prompts} texts", param=body.text_field)
    if len(body.placeholders) > context.config.max_placeholders:
        raise InvalidRequest(f"placeholders: at most {context.config.max_placeholders}", param="placeholders")
    if sum(map(len, body.text_list)) * sum(map(len, body.placeholders)) > MAX_SEARCH:
        raise InvalidRequest("placeholders: too many for so much text; send it in several requests", param="placeholders")
    target = language_code(body.target_lang, body.target_field)
    source = AUTO if body.source_lang.strip().lower() in ("", AUTO) else language_code(body.source_lang, body.source_field)
    work = Work(context, target, Placeholders(body.placeholders), body.text_field)
    return await context.app.answer_when_done(context, answer(work, body, source))


async def answer(work: "Work", body: TranslateBody, source: str) -> Response:
    """Translate and put the answer together, in the form of the body."""
    sources = await work.sources(body.text_list, source)
    results = await work.texts(list(zip(body.text_list, sources, strict=True)))
    errors = [result for result in results if isinstance(result, RwkvBatchError)]
    if errors and len(errors) == len(results):
        raise errors[0]
    items = []
    for text, found, result in zip(body.text_list, sources, results, strict=True):
        code = found if source == AUTO else body.source_lang
        item = {"text": result, "src": code} if isinstance(body, TextsBody) else {"detected_source_lang": code, "text": result}
        if isinstance(result, RwkvBatchError):
            item |= {"text": text, "error": result.message}
        items.append(item)
    if isinstance(body, TextBody) and isinstance(work.context.body[body.text_field], str):
        return json_reply(items[0] | {"from": items[0]["src"]})
    return json_reply({"translations": items})


def form_of(data: dict[str, Any]) -> type[TranslateBody]:
    """Which client's names a body has."""
    if data.get("text_list") is None:
        for form in (TextBody, TextsBody):
            if data.get(form.text_field) is not None:
                return form
    return TranslateBody


def read(form: type[TranslateBody], data: dict[str, Any]) -> TranslateBody:
    """Check a body. Raises InvalidRequest."""
    for field in (form.target_field, form.text_field):
        if data.get(field) is None:
            raise InvalidRequest(f"Missing {field}", param=field)
    return validate(form, data)


def language_code(text: str, field: str) -> str:
    """The code of a language. Raises InvalidRequest for one that is not known."""
    code = languages.find(text)
    if code is None:
        raise InvalidRequest(f"{field}: not a language code or English name that is known here", param=field)
    return code


class Work:
    """Translates for one call. A failure stands in the place of the translation."""

    def __init__(self, context: RequestContext, target: str, placeholders: Placeholders, field: str = TranslateBody.text_field):
        """`field`: what errors call the texts."""
        self.context = context
        self.app = context.app
        self.target = target
        self.placeholders = placeholders
        self.field = field
        self.num_requests = 0

    async def sources(self, texts: list[str], source: str) -> list[str]:
        """The language of each text; with "auto" the target's only for those that were found to be in it."""
        if source != AUTO:
            return [source] * len(texts)
        return await asyncio.to_thread(self._detect, texts)

    def _detect(self, texts: list[str]) -> list[str]:
        begins = [self.placeholders.without(text[: languages.MAX_CHARACTERS]) for text in texts]
        return languages.detect(begins, self.target)

    async def texts(self, texts: list[tuple[str, str]]) -> list[str | RwkvBatchError]:
        """Translate texts, each with its language."""
        parts, wanted = await off_loop(sum(len(text) for text, _ in texts), self._cut, texts)
        found = await self.paragraphs(list(dict.fromkeys(paragraph for row in wanted for paragraph in row if paragraph)))
        results: list[str | RwkvBatchError] = []
        for pieces, row in zip(parts, wanted, strict=True):
            joined = [found[paragraph] if paragraph else piece for piece, paragraph in zip(pieces, row, strict=True)]
            errors = [part for part in joined if isinstance(part, RwkvBatchError)]
            results.append(errors[0] if errors else "".join(joined))
        return results

    def _cut(self, texts: list[tuple[str, str]]) -> tuple[list[list[str]], list[list[Paragraph | None]]]:
        """The parts of each text, and for each of them what is to be translated."""
        parts = split_all([text for text, _ in texts], MAX_PARTS * self.context.config.max_prompts, self.field)
        wanted = [
            [self._paragraph(part, source) if i % 2 == 0 else None for i, part in enumerate(pieces)]
            for pieces, (_, source) in zip(parts, texts, strict=True)
        ]
        return parts, wanted

    def _paragraph(self, text: str, source: str) -> Paragraph | None:
        """What is to be done with a part of a text; None when it stays as it is."""
        if source == self.target or not languages.has_letters(self.placeholders.without(text)):
            return None
        return Paragraph(text, source, self.target)

    async def paragraphs(self, wanted: list[Paragraph]) -> dict[Paragraph, str | RwkvBatchError]:
        """Translate what is not remembered; where placeholders got lost, try again around them, then give the text back."""
        remembered = self.app.translations
        found: dict[Paragraph, str | RwkvBatchError] = {}
        for paragraph in wanted:
            if (known := remembered.get(self._key(paragraph))) is not None:
                found[paragraph] = known
        new = await self._generate([paragraph for paragraph in wanted if paragraph not in found])
        broken = [paragraph for paragraph, text in new.items() if isinstance(text, str) and not self._intact(paragraph, text)]
        new |= {paragraph: paragraph.text for paragraph in broken}
        new |= await self._around([paragraph for paragraph in broken if self.placeholders.found(paragraph.text)])
        for paragraph, text in new.items():
            if isinstance(text, str):
                remembered.put(self._key(paragraph), text)
        return found | new

    async def _around(self, broken: list[Paragraph]) -> dict[Paragraph, str | RwkvBatchError]:
        """Translate the texts between the placeholders, so that these stay where they are."""
        cuts = {paragraph: self.placeholders.cut(paragraph.text) for paragraph in broken}
        between = [(part, paragraph.source) for paragraph, parts in cuts.items() for part in parts[::2]]
        if len(between) > self.context.config.max_prompts:
            return {}
        translated = iter(await self.texts(between) if between else [])
        results: dict[Paragraph, str | RwkvBatchError] = {}
        for paragraph, parts in cuts.items():
            texts = [next(translated) for _ in parts[::2]]
            error = next((text for text in texts if isinstance(text, RwkvBatchError)), None)
            parts[::2] = texts if error is None else parts[::2]
            whole = "".join(parts)
            results[paragraph] = error or (whole if self._intact(paragraph, whole) else paragraph.text)
        return results

    def _intact(self, paragraph: Paragraph, text: str) -> bool:
        return self.placeholders.found(paragraph.text) == self.placeholders.found(text)

    def _key(self, paragraph: Paragraph) -> tuple:
        info = self.context.model.info
        return (*paragraph, self.placeholders.key, self.context.namespace, info.fingerprint if info else "")

    async def _generate(self, wanted: list[Paragraph]) -> dict[Paragraph, str | RwkvBatchError]:
        """Ask the model; a paragraph for which it says nothing stays as it is."""
        if not wanted:
            return {}
        if len(wanted) > self.context.config.max_prompts:
            limit = self.context.config.max_prompts
            raise InvalidRequest(f"{self.field}: at most {limit} different paragraphs, not {len(wanted)}", param=self.field)
        names = {code: languages.LANGUAGES[code].name for code in (self.target, *(p.source for p in wanted))}
        many = languages.LANGUAGES[self.target].script in languages.MANY_TOKENS
        texts = [prompts.translation(names[p.source], names[p.target], p.text) for p in wanted]
        rows: dict[int, list[tuple[Paragraph, list[int]]]] = {}
        for paragraph, ids in zip(wanted, await self.app.encode(self.context, texts, self.field), strict=True):
            limit = token_limit(len(ids), self.context.config.translate_ratio, many=many)
            rows.setdefault(min(limit, self.context.config.max_tokens_limit), []).append((paragraph, ids))
        stops = [stop.encode() for stop in prompts.translation_stops(sorted(set(names.values())))]
        groups = []
        for limit, group in rows.items():
            self.num_requests += 1
            self.context.num_prompts += len(group)
            self.context.prompt_tokens += sum(len(ids) for _, ids in group)
            request = Request(
                id=f"{self.context.id}-{self.num_requests}",
                prompts=[ids for _, ids in group],
                sampling=GREEDY,
                max_tokens=limit,
                stop_texts=stops,
                loop="continuous",
                chunk_size=0,
                namespace=self.context.namespace,
            )
            groups.append(Group(request, [paragraph for paragraph, _ in group]))
        await asyncio.gather(*(group.run(self.context) for group in groups))
        return {paragraph: text for group in groups for paragraph, text in group.results()}


class Group:
    """One request's paragraphs: those of about the same length."""

    def __init__(self, request: Request, wanted: list[Paragraph]):
        self.request = request
        self.wanted = wanted
        self.texts: list[list[str]] = [[] for _ in wanted]
        self.errors: list[RwkvBatchError | None] = [None] * len(wanted)

    async def run(self, context: RequestContext) -> None:
        """Submit and wait for the end; leaves nothing running when it is cancelled."""
        ended = asyncio.Event()
        try:
            ticket = await context.app.submit(context, self.request, self.feed, ended)
        except RwkvBatchError as error:
            self.errors = [error] * len(self.wanted)
            return
        try:
            await ended.wait()
        finally:
            ticket.cancel()
            context.completion_tokens += ticket.completion_tokens

    def feed(self, event: Event) -> None:
        """Take one event; called in the client's thread, read after the end."""
        if isinstance(event, Failure):
            self.errors = [event.exception()] * len(self.wanted)
            return
        for delta in event.deltas:
            self.texts[delta.index].append(delta.text)
        for finish in event.finishes:
            if finish.reason not in ("stop", "length"):
                self.errors[finish.index] = EngineFailed(finish.error or "the row was cancelled")

    def results(self) -> Iterable[tuple[Paragraph, str | RwkvBatchError]]:
        """Each paragraph with its translation."""
        for paragraph, parts, error in zip(self.wanted, self.texts, self.errors, strict=True):
            yield paragraph, error or "".join(parts).strip() or paragraph.text
