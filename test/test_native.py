"""Native bodies become requests with the rule, loop, stops and template of their route; and the rules by hand."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import quiet_robyn  # noqa: F401
import torch

from routes.http.access import from_this_host
from routes.native.batch import BatchContentsBody, BatchPromptsBody, CountBody, tokens_count
from routes.native.big_batch import BigBatchBody
from routes.native.chat import V2Body, V3Body
from routes.native.fim import FimBody
from routes.native.translate import Group, Paragraph, Work
from routes.schemas import ContentsBody, Message, prompt_ids, validate
from rwkv_batch.config import Config
from rwkv_batch.errors import EngineFailed, InvalidRequest
from rwkv_batch.request import Delta, Failure, Finish, Progress, Request
from rwkv_batch.served.models import ModelEntry
from rwkv_batch.text.translation import Placeholders
from sampling.params import SamplingParams
from sampling.reference import ReferenceSampler


def request_of(kind, **body) -> Request:
    """The request of a body, tokens being bytes."""
    checked = validate(kind, body)
    return checked.to_request(checked.checked_texts(Config()), "id", Config(), lambda text: list(text.encode()))


def prompt_of(kind, **body) -> str:
    """The text of its first prompt."""
    return bytes(request_of(kind, **body).prompts[0]).decode()


@pytest.mark.parametrize(
    ("kind", "rule", "loop"),
    [(ContentsBody, "joint", "sync"), (V2Body, "sequential", "continuous"), (V3Body, "joint", "sync"),
     (BigBatchBody, "gumbel", "sync"), (BatchContentsBody, "joint", "sync")],
)  # fmt: skip
def test_rules_and_loops(kind, rule, loop):
    """Contract 9, line 17, and decision (b)."""
    request = request_of(kind, contents=["a"])
    assert (request.sampling.rule, request.loop) == (rule, loop)
    assert request.stop_texts == [b"\nUser:"]


def test_defaults_of_fim():
    """Contract 1.7 and 2.4."""
    request = request_of(FimBody, prefix="a", suffix="b")
    assert (request.sampling.rule, request.stop_texts, request.stop_ids) == ("joint", ["✿".encode()], [])
    assert prompt_of(FimBody, prefix=["a"], suffix=["b"]) == "✿prefix✿✿suffix✿b✿middle✿a"
    with pytest.raises(InvalidRequest, match="as many of each"):
        request_of(FimBody, prefix=["a"], suffix=[])


@pytest.mark.parametrize(
    ("more", "ids", "texts"),
    [
        ({"stop_tokens": [0, 261]}, [0, 261], ["✿"]),
        ({"stop_tokens": ["x"]}, [], ["x", "✿"]),
        ({"stop_tokens": []}, [], ["✿"]),
        ({"ignore_eos": True}, [], []),
        ({"ignore_eos": True, "stop_tokens": ["x"]}, [], ["x"]),
    ],
)
def test_fim_stops_at_the_mark_whatever_stops_are_sent(more, ids, texts):
    """Decision (q)."""
    request = request_of(FimBody, prefix="a", suffix="b", **more)
    assert (request.stop_ids, request.stop_texts) == (ids, [text.encode() for text in texts])


def test_token_0_in_front():
    """Contract 2.6."""
    assert request_of(V2Body, contents=["a", ""]).prompts == [[0, 97], [0]]
    assert request_of(V2Body, contents=["a"], pad_zero=False).prompts == [[97]]
    assert request_of(ContentsBody, contents=["a"]).prompts == [[97]]
    assert request_of(ContentsBody, contents=["a"], pad_zero=True).prompts == [[0, 97]]


def test_noise_counts_where_it_was_sent():
    """Decision (h)."""
    assert request_of(BigBatchBody, contents=["a"], noise=0).sampling.greedy
    assert request_of(BigBatchBody, contents=["a"], noise=2).sampling.rule == "noise"
    assert not request_of(BigBatchBody, contents=["a"], noise=None).sampling.greedy
    assert request_of(BigBatchBody, contents=["a"], temperature=0).sampling.greedy
    assert request_of(BatchPromptsBody, prompts=["a"], temperature=1.0).sampling.greedy
    assert request_of(BatchPromptsBody, prompts=["a"], noise=3).sampling.noise == 3


def test_the_prompts_of_v3():
    """Contract 1.5."""
    assert prompt_of(V3Body, contents=["a\n\nb "]) == "User: a\n\nb \n\nAssistant: <think>\n</think>"
    messages = [{"role": "user", "content": "a"}, {"role": "developer", "content": "s"}]
    assert prompt_of(V3Body, messages=messages, enable_think=True) == "System: s\n\nUser: a\n\nAssistant: <think"
    assert prompt_of(V3Body, contents=["a"], messages=messages).startswith("User: a\n\n")
    assert len(request_of(V3Body, contents=["a", "b"]).prompts) == 2


@pytest.mark.parametrize("text", ["a\n\nb", "  hi  ", "\r\n x\t\n\n\n", ""])
def test_a_single_user_message_of_v3_is_taken_as_it_is(text):
    """Decision (q): as in `contents`."""
    assert prompt_of(V3Body, messages=[{"role": "User", "content": text}]) == prompt_of(V3Body, contents=[text])


NOTHING = [{"role": "user", "content": None}, {"role": "assistant", "content": " \n"}, {"role": "system", "content": ""}]


def test_conversations_in_which_nobody_says_anything_are_refused():
    with pytest.raises(InvalidRequest, match="Empty prompt") as refused:
        prompt_of(V3Body, messages=NOTHING)
    assert refused.value.param == "messages"
    for chat in ({"messages": []}, {"messages": NOTHING}, {"messages": [], "system": " "}):
        with pytest.raises(InvalidRequest, match=r"chats\[1\]\.messages") as refused:
            request_of(BigBatchBody, chats=[{"messages": [{"content": "a"}]}, chat])
        assert refused.value.param == "chats[1].messages"


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (V3Body, {"messages": [{"content": "abc"}]}, "messages[0]"),
        (V3Body, {"contents": ["a", "abc"], "messages": [{"content": "abc"}]}, "contents[0]"),
        (BigBatchBody, {"chats": [{"messages": [{"content": "abc"}]}]}, "chats[0]"),
        (BigBatchBody, {"contents": ["a", "abc"]}, "contents[1]"),
    ],
)
def test_an_error_about_a_prompt_that_is_too_long_names_its_field(kind, body, field):
    checked, config = validate(kind, body), Config(max_prompt_tokens=2)
    texts = checked.checked_texts(config)
    with pytest.raises(InvalidRequest) as refused:
        checked.to_request(texts, "id", config, list)
    assert (refused.value.param, refused.value.message.partition(":")[0]) == (field, field)


def test_an_error_about_what_is_counted_names_its_field():
    assert validate(CountBody, {"messages": [], "contents": ["a", "b"]}).joined() == ("ab", "contents")
    with pytest.raises(InvalidRequest, match="Missing text or messages"):
        validate(CountBody, {"messages": []}).joined()

    async def encode(context, texts, field):
        return prompt_ids(texts, field, Config(max_prompt_tokens=2), list)

    model = SimpleNamespace(entry=ModelEntry("m", []))
    call = SimpleNamespace(app=SimpleNamespace(encode=encode), model=model, body_bytes=0)
    for body in ({"text": "abc"}, {"messages": [{"content": "abc"}]}, {"contents": ["abc"]}):
        call.body = body
        with pytest.raises(InvalidRequest) as refused:
            asyncio.run(tokens_count(call))
        assert (refused.value.param, refused.value.message.partition(":")[0]) == (next(iter(body)),) * 2


def test_messages():
    assert validate_message(content=["a", {"type": "text", "text": "b"}]).content == "ab"
    assert validate_message(content=None).content == ""
    for wrong in ([{"type": "image_url", "image_url": {}}], [5], {"text": "a"}, 5):
        with pytest.raises(ValueError, match="content"):
            validate_message(content=wrong)


def validate_message(**fields) -> Message:
    return Message.model_validate({"role": "user", **fields})


@pytest.mark.parametrize(
    ("peer", "headers", "local"),
    [
        ("127.0.0.1", {}, True), ("::1", {}, True), ("127.8.0.1", {}, True), ("::ffff:127.0.0.1", {}, True),
        ("192.168.0.7", {}, False), ("::ffff:10.0.0.1", {}, False), ("", {}, False), ("unix", {}, False),
        ("127.0.0.1", {"x-forwarded-for": ""}, False), ("127.0.0.1", {"forwarded": "for=::1"}, False),
        ("127.0.0.1", {"host": "public.example"}, False), ("127.0.0.1", {"host": "10.0.0.7"}, False),
        ("127.0.0.1", {"host": "127.0.0.1:8000"}, True), ("127.0.0.1", {"connection": "close"}, False),
    ],
)  # fmt: skip
def test_who_calls_from_this_host(peer, headers, local):
    """Decision (e); a proxy may say nothing but for the client's Host, or close its connection as nginx does."""
    assert from_this_host({"host": "localhost:8000"} | headers, peer) is local


def test_keys_do_not_share_remembered_sentences():
    model = SimpleNamespace(info=None)
    alice, bob = (
        Work(SimpleNamespace(app=None, model=model, namespace=name), "de", Placeholders()) for name in ("alice", "bob")
    )
    paragraph = Paragraph("one", "en", "de")
    assert alice._key(paragraph) == Work(alice.context, "de", Placeholders())._key(paragraph)
    assert alice._key(paragraph) != bob._key(paragraph)


def test_a_paragraph_without_an_answer_stays_as_it_is():
    wanted = [Paragraph(text, "en", "de") for text in ("one", "two", "three")]
    group = Group(Request(id="r", prompts=[[1]] * 3, sampling=SamplingParams(), max_tokens=1), wanted)
    group.feed(Progress("r", [Delta(0, " ein", 1), Delta(1, " \n", 1)], [Finish(2, "error", 1, 1, "not finite")]))
    group.feed(Progress("r", [Delta(0, "s\n", 1)], [Finish(0, "stop", 1, 2), Finish(1, "length", 1, 1)]))
    results = dict(group.results())
    assert [results[wanted[0]], results[wanted[1]], type(results[wanted[2]])] == ["eins", "two", EngineFailed]
    group.feed(Failure("r", "Overloaded", "full"))
    assert {type(result).__name__ for result in dict(group.results()).values()} == {"Overloaded"}


# --- the sampling rules on four tokens, by hand ---

PROBABILITIES = [0.5, 0.25, 0.15, 0.1]


def drawn(num_rows: int = 4000, **controls) -> list[float]:
    """How often each of the four tokens comes."""
    sampler = ReferenceSampler(num_rows, torch.arange(1, 5))
    off = {"alpha_presence": 0.0, "alpha_frequency": 0.0}
    slots = list(range(num_rows))
    sampler.start_many(slots, [SamplingParams(seed=slot, **off, **controls) for slot in slots], [0] * num_rows)
    logits = torch.tensor(PROBABILITIES).log().expand(num_rows, 4)
    tokens = sampler.sample(logits.contiguous(), torch.tensor(slots)).ids
    return [(tokens == token).float().mean().item() for token in range(1, 5)]


def near(found: list[float], expected: list[float]) -> bool:
    """Within four standard deviations of 4,000 draws."""
    return all(abs(f - e) <= 4 * math.sqrt(e * (1 - e) / 4000) for f, e in zip(found, expected, strict=True))


def test_joint_rule_by_hand():
    """Contract 9, line 14: top_p on the full softmax; the boundary token keeps 0.6 - 0.5 of its 0.25."""
    assert near(drawn(rule="joint", top_k=0, top_p=0.6), [0.5 / 0.6, 0.1 / 0.6, 0, 0])
    assert near(drawn(rule="joint", top_k=3, top_p=1.0), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0])


def test_sequential_rule_by_hand():
    """Contract 9, line 17: top_p inside the three best, 0.56, 0.28, 0.17; the token that crosses it is kept whole."""
    assert near(drawn(rule="sequential", top_k=3, top_p=0.6), [2 / 3, 1 / 3, 0, 0])


@pytest.mark.parametrize(
    ("presence", "frequency", "expected"),
    [
        (1.0, 0.5, [1.0, 0.9 + 0.5, 1.4 * 0.9 + 0.5]),
        (0.0, 0.5, [0.5, 0.45 + 0.5, 0.95 * 0.9 + 0.5]),
        (1.0, 0.0, [1.0, 0.9, 0.81]),
    ],
)
def test_penalties_by_hand(presence, frequency, expected):
    """Contract 9, line 14: presence first, frequency later, decay of all; decision (g): frequency alone acts too."""
    sampler = ReferenceSampler(1, torch.arange(1, 5))
    params = SamplingParams(temperature=0, alpha_presence=presence, alpha_frequency=frequency, alpha_decay=0.9)
    sampler.start_many([0], [params], [0])
    for penalty in expected:
        assert sampler.sample(torch.tensor([[100.0, 0, 0, 0]]), torch.tensor([0])).ids.tolist() == [1]
        assert sampler.controls.penalties[0].tolist() == pytest.approx([penalty, 0, 0, 0])
