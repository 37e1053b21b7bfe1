"""Rows that follow a grammar, on a real engine of a tiny model: what they may say, how they end, and who else notices."""

import functools
import json
import re
import threading
import time

import pytest
import random_schemas
import torch
from models import TINY, random_tensors
from test_worker import GREEDY, Harness, in_stages

from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.row_output import RowOutput
from rwkv_batch.grammar.masks import Columns, Grammars
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.model.weights import Weights, from_tensors
from rwkv_batch.request import Grammar
from rwkv_batch.scheduling.scheduler import Scheduler
from rwkv_batch.session_messages import Session
from rwkv_batch.text.grammar import of_schema
from sampling.masks import pack, unpack
from sampling.params import SamplingParams
from sampling.reference import ReferenceSampler

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DRAWN = SamplingParams(temperature=1, top_k=0, top_p=1, seed=5)
# A number may have any number of digits, of which a random model does not tire by itself.
WEARY = SamplingParams(temperature=1, top_k=0, top_p=1, seed=5, alpha_presence=0.5, alpha_frequency=0.5, alpha_decay=1)
# Few tokens to choose from: among tens of thousands that are alike, a rounding would choose another.
HEAVY = SamplingParams(temperature=1, top_k=4, top_p=1, seed=9, alpha_presence=0.7, alpha_frequency=0.3, repetition_penalty=1.1)
LATE = pytest.mark.parametrize("late", [False, True])


@functools.cache
def with_end(vocab: int) -> Weights:
    """A model that may sample the end token, which the other tests' models never do."""
    tensors = dict(random_tensors(TINY, vocab))
    head = tensors["head.weight"].clone()
    head[0] = head[1:].mean(0)
    return from_tensors(tensors | {"head.weight": head})


class GrammarHarness(Harness):
    """The same with grammars."""

    def __init__(self, *, vocab=256, slots=8, late=False, stages=1):
        super().__init__(vocab=vocab, slots=slots)
        mixed = not late and stages == 1
        self.scheduler = Scheduler(num_slots=slots, prefill_budget=256, mixed=mixed, late_draws=late, num_groups=stages)
        weights = with_end(vocab)
        self.engine = Engine(Model(weights), ReferenceSampler(slots, weights.output_ids), State(weights.shape, slots))
        if stages > 1:
            self.engine = in_stages(weights, slots, 256, stages)
        grammars = Grammars(self.tokenizer, weights.output_ids.tolist())
        self.worker = type(self.worker)(
            self.engine, self.scheduler, self.tokenizer, self.deliver, sessions=self.sessions, grammars=grammars
        )

    def always_wait(self):
        """Have each mask made before the next step is planned."""
        grammars, made = self.worker.grammars, threading.Event()
        notify, flush = grammars.notify, grammars.flush

        def tell(masks):
            notify(masks)
            made.set()

        def flush_and_wait():
            waits = bool(grammars._told)
            made.clear()
            flush()
            assert not waits or made.wait(60), "masks come"

        grammars.notify, grammars.flush = tell, flush_and_wait

    def run(self, seconds=100):
        deadline = time.monotonic() + seconds
        while self.worker._active or self.worker._flight or self.worker._preparing or self.worker._inbox._queue.qsize():
            self.worker.step()
            assert time.monotonic() < deadline, "the rows do not come to their ends"

    def say(self, grammar, *, prompt=(5, 7), **fields):
        """Return the texts of a request's rows and their reasons."""
        self.submit("row", [list(prompt)], grammar=grammar, **{"sampling": DRAWN, "max_tokens": 200, **fields})
        self.run()
        assert not self.failures, self.failures
        texts, finishes = self.texts.pop("row", {}), self.finishes.pop("row")
        return [texts.get(index, "") for index in sorted(finishes)], [finishes[index].reason for index in sorted(finishes)]


@pytest.mark.parametrize("vocab", [256, 65536])
def test_a_row_says_what_its_schema_allows_and_ends_with_it(vocab):
    jsonschema = pytest.importorskip("jsonschema")
    harness = GrammarHarness(vocab=vocab)
    texts, reasons = harness.say(of_schema(PERSON, "response_format"), copies=4)
    assert reasons == ["stop"] * 4
    for text in texts:
        jsonschema.Draft202012Validator(PERSON).validate(json.loads(text))
    assert len(set(texts)) > 1


@pytest.mark.parametrize(("ignore_eos", "late"), [(True, False), (False, True)])
def test_a_row_ends_where_its_grammar_allows_nothing_more(ignore_eos, late):
    harness = GrammarHarness(vocab=65536, late=late)
    sampling = SamplingParams(temperature=1, top_k=0, top_p=1, seed=5, ignore_eos=ignore_eos)
    for pattern in ("[a-c]{3,9}", "(yes|no)", "constant text", "[你好é]{4}", "a"):
        (text,), (reason,) = harness.say(Grammar("regex", pattern, "p"), sampling=sampling, max_tokens=50)
        assert re.fullmatch(pattern, text)
        assert reason == "stop"
    grammar = Grammar("lark", 'start: "(" start ")" | "x"', "p")
    (text,), _ = harness.say(grammar, sampling=sampling)
    assert re.fullmatch(r"(\(*)x(\)*)", text)
    assert text.count("(") == text.count(")")


@LATE
def test_a_row_may_be_cut_by_its_length_and_by_stops(late):
    harness = GrammarHarness(late=late)
    grammar = Grammar("regex", "x{100}", "p")
    (text,), (reason,) = harness.say(grammar, max_tokens=5)
    assert (set(text), reason) == ({"x"}, "length")
    (text,), (reason,) = harness.say(Grammar("regex", "one, two, three[0-9]", "p"), stop_texts=[b" three"])
    assert (text, reason) == ("one, two,", "stop")
    assert harness.say(grammar, max_tokens=0) == ([""], ["length"])


@LATE
def test_a_grammar_that_allows_everything_changes_nothing(late):
    anything = Grammar("lark", "start: <[1-255]>*", "p")
    harness = GrammarHarness(late=late)
    unending = SamplingParams(temperature=1, seed=5, ignore_eos=True)
    free = harness.say(None, copies=3, max_tokens=24, sampling=unending)
    assert harness.say(anything, copies=3, max_tokens=24, sampling=unending) == free


@LATE
def test_plain_rows_run_in_every_step_and_say_the_same(late):
    def run(masked):
        harness = GrammarHarness(late=late)
        steps = []
        submit = harness.engine.submit

        def note(plan):
            if harness.scheduler.mixed or not any(row.ids for row in plan.rows):
                steps.append({row.sequence.request.id for row in plan.rows})
            return submit(plan)

        harness.engine.submit = note
        harness.submit("plain", [[3, 4], [9]], sampling=DRAWN, max_tokens=60)
        if masked:
            harness.submit("masked", [[5, 7]], sampling=DRAWN, max_tokens=60, grammar=of_schema(PERSON, "p"), copies=3)
        harness.run()
        assert not harness.failures
        return dict(harness.texts["plain"]), steps

    (texts, steps), (alone, _) = run(True), run(False)
    assert texts == alone
    plain = [step for step in steps if "plain" in step]
    assert steps[: len(plain)] == plain
    assert any("masked" in step for step in plain)


def test_sessions_logprobs_and_penalties_go_on_working():
    sampling = SamplingParams(temperature=1, seed=1, alpha_presence=0.5, alpha_frequency=0.5, logprobs=2)
    found = []
    for late in (False, True):
        harness = GrammarHarness(late=late)
        for stop_texts in ([], [b"ge"]):
            (text,), _ = harness.say(
                of_schema(PERSON, "p"), sampling=sampling, session=Session(name="s"), stop_texts=stop_texts
            )
            found.append((text, harness.sessions.states["s"].elapsed))
            found.append(harness.say(None, sampling=GREEDY, session=Session(name="s"), max_tokens=20))
    assert found[:4] == found[4:]
    (text, elapsed), *_ = found
    assert elapsed == 2 + len(text.encode()), "all of it, and nothing more"


def test_a_row_that_samples_late_says_the_same_in_fewer_steps():
    def run(late):
        harness = GrammarHarness(late=late)
        harness.scheduler.mixed = False
        harness.always_wait()
        plans, submit = [], harness.engine.submit
        harness.engine.submit = lambda plan: plans.append({row.sequence.request.id for row in plan.rows}) or submit(plan)
        harness.submit("plain", [[3]], sampling=GREEDY, max_tokens=120)
        harness.submit("masked", [[5, 7]], sampling=WEARY, max_tokens=60, copies=3, grammar=Grammar("regex", "[a-z ]{50}", "p"))
        harness.run()
        assert not harness.failures
        places = [place for place, plan in enumerate(plans) if "masked" in plan][1:]  # without the prompt's
        return harness.texts, len(places), places[-1] - places[0] + 1

    (late, num_late, late_span), (soon, num_soon, soon_span) = run(True), run(False)
    assert late == soon
    assert (num_late, num_soon) == (late_span, 49) == (50, 49)
    assert soon_span > 90, "every other step is sat out"


@pytest.mark.parametrize(("late", "copies"), [(False, 4), (True, 1)])
def test_forced_tokens_are_fed_and_change_nothing(monkeypatch, late, copies):
    def run(**fields):
        harness = GrammarHarness(vocab=65536, late=late)
        harness.always_wait()
        fed = []
        submit = harness.engine.submit

        def note(plan):
            fed.append([len(row.ids) or 1 for row in plan.rows])
            return submit(plan)

        harness.engine.submit = note
        grammar = of_schema({**PERSON, "properties": {**PERSON["properties"], "mood": {"enum": ["so so", "very good"]}}}, "p")
        found = harness.say(grammar, sampling=HEAVY, copies=copies, **fields), {**harness.worker._totals}
        return *found, fed

    texts, totals, fed = run()
    monkeypatch.setattr(RowOutput, "may_be_fed", lambda row: False)
    plain, plain_totals, plain_fed = run()
    assert texts == plain
    assert totals["generation_tokens_total"] == plain_totals["generation_tokens_total"]
    assert len(fed) < 0.8 * len(plain_fed), "steps"
    assert max(map(max, fed)) > max(map(max, plain_fed)) == 2, "the prompt has two tokens"


def test_a_row_among_others_draws_what_it_must_say():
    def run(others):
        harness = GrammarHarness(late=True, slots=16)
        harness.always_wait()
        steps, submit = [], harness.engine.submit
        harness.engine.submit = lambda plan: steps.append(max(len(row.ids) for row in plan.rows)) or submit(plan)
        for number in range(others):
            harness.submit(f"plain {number}", [[3]], sampling=GREEDY, max_tokens=60)
        said = harness.say(Grammar("regex", "[ab]eight or so[ab]", "p"), sampling=HEAVY)
        return said, [fed for fed in steps if fed > 2]

    (alone, fed), (beside, fed_beside) = run(0), run(15)
    assert alone == beside
    assert (len(fed), fed_beside) == (1, []), "one step feeds it where few wait for that, and none where many would"


def test_forced_tokens_come_at_once_and_count():
    harness = GrammarHarness(vocab=65536)
    constant = Grammar("regex", "[ab]a long text that nobody can choose[cd]", "p")
    first = Grammar("regex", "a long text that nobody can choose[cd]", "p")
    for grammar in (constant, first):
        whole, _ = harness.say(grammar, chunk_size=1)
        number = len(harness.tokenizer.encode(whole[0]))
        for max_tokens in range(1, number + 2):
            (text,), (reason,) = harness.say(grammar, max_tokens=max_tokens)
            assert whole[0].startswith(text)
            assert reason == ("length" if text != whole[0] else reason)
        (text,), (reason,) = harness.say(grammar, stop_texts=[b"that"])
        assert (text, reason) == (whole[0][: whole[0].index("that")], "stop")
        assert harness.say(grammar, stop_texts=[b"choosec", b"chosen"])[0][0] in (
            whole[0],
            whole[0][: whole[0].index("choosec")],
        )


def test_a_wrong_grammar_fails_its_request_alone():
    harness = GrammarHarness()
    harness.submit("free", [[3]], max_tokens=5)
    wrong = {
        "keyword": (Grammar("json_schema", '{"type": "array", "uniqueItems": true}', "response_format"), "uniqueItems"),
        "regex": (Grammar("regex", "(?=a)b", "guided_regex"), "look-around"),
        "nothing": (Grammar("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "p"), "greater than maximum"),
        "session": (Grammar("regex", "()", "p"), "empty"),
    }
    for id, (grammar, _) in wrong.items():
        harness.submit(id, [[5]], grammar=grammar, session=Session(name="s") if id == "session" else None)
    harness.run()
    for id, (grammar, word) in wrong.items():
        assert word in harness.failures[id].message
        assert (harness.failures[id].param, harness.failures[id].error) == (grammar.param, "InvalidRequest")
    assert harness.sessions.released == ["s"]
    assert harness.finishes["free"][0].reason == "length"
    assert harness.worker._num_waiting == 0


@LATE
def test_a_cancelled_request_is_gone_whatever_it_waits_for(late):
    harness = GrammarHarness(late=late)
    for number in range(6):
        harness.submit(f"r{number}", [[5]], grammar=of_schema(PERSON, "p"), sampling=DRAWN)
        for _ in range(number):
            harness.worker.step()
        harness.worker.cancel(f"r{number}")
    harness.run()
    assert harness.worker._num_waiting == 0
    assert harness.scheduler.num_free == 8
    assert not any(harness.finishes.values())


def test_columns_of_a_reduced_vocabulary():
    ids = [0, 3, 4, 31, 32, 33, 64, 70]
    columns = Columns(ids, 71)
    flags = torch.zeros(96, dtype=torch.bool)
    flags[[3, 31, 33, 40, 70]] = True
    assert unpack(columns.of(pack(flags).numpy()), 8).tolist() == [id in (3, 31, 33, 70) for id in ids]
    assert unpack(columns.only(33), 8).tolist() == [id == 33 for id in ids]
    assert unpack(Columns(range(64), 71).only(31), 64).nonzero().tolist() == [[31]]


def answers(seeds: range, vocab: int) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    harness = GrammarHarness(vocab=vocab, slots=64)
    schemas = {f"{seed}": random_schemas.schema(seed) for seed in seeds}
    for id, schema in schemas.items():
        harness.submit(id, [[5, 7]], grammar=of_schema(schema, "p"), sampling=WEARY, max_tokens=1000)
    harness.run(600)
    assert not harness.failures, {id: (schemas[id], failure.message) for id, failure in harness.failures.items()}
    for id, schema in schemas.items():
        text, reason = harness.texts[id][0], harness.finishes[id][0].reason
        assert reason == "stop", (schema, text)
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))


def test_random_schemas_have_valid_answers():
    answers(range(24), 256)


@pytest.mark.long
@pytest.mark.parametrize("vocab", [256, 65536])
def test_200_random_schemas_have_valid_answers(vocab):
    answers(range(200), vocab)
