"""The soak's checker finds what it is there for."""

import argparse
import asyncio
import os
import time

import pytest

from bench.soak import Exchange, Soak, children, payloads, process_figures, rows_of

OWN, OTHERS = "a text of its own, long enough", "what another prompt was answered"


@pytest.fixture
def soak() -> Soak:
    args = argparse.Namespace(url="http://127.0.0.1:1", password="", seed=0, right="exact", least=1.0)
    found = Soak(args)
    found.right = {("v1", 0): OWN, ("v1", 1): OTHERS}
    return found


def stream(*events) -> Exchange:
    return Exchange(0.0, 200, events=list(events))


def chunk(index: int, text: str, **more) -> dict:
    return {"choices": [{"index": index, "delta": {"content": text}, **more}]}


def test_rows_of_a_stream_are_joined_and_those_with_faults_refused():
    end = chunk(0, "", finish_reason="stop")
    rows = rows_of(stream(chunk(1, "c"), chunk(0, "a"), chunk(0, "b"), end, "[DONE]"))
    assert rows.texts == ["ab", "c"]
    for broken in ([chunk(0, "a"), end], [end, chunk(0, "a"), "[DONE]"], [chunk(1, "a"), "[DONE]"]):
        with pytest.raises(AssertionError):
            rows_of(stream(*broken))
    with pytest.raises(AssertionError):
        rows_of(Exchange(0.0, 200, {"choices": [{"index": 1, "text": "a", "finish_reason": "stop"}], "usage": {}}))


def test_comments_between_events_are_no_events():
    assert payloads(b': ping\ndata: {"a": 1}\n\n:\nevent: x\ndata: [DONE]\n\n') == [{"a": 1}, "[DONE]"]


def test_a_row_that_leaves_its_text_is_a_fault_where_it_must_not(soak):
    assert soak.check_text("v1", ("v1", 0), OWN, OWN)
    assert not soak.faults
    assert not soak.check_text("v1", ("v1", 0), OWN + "!", OWN)
    assert soak.faults["v1"] == 1
    soak.args.right = "prefix:6"
    soak.check_text("v1", ("v1", 0), OWN[:20] + "else", OWN)
    assert soak.faults["v1"] == 1
    assert soak.rows["v1"] == {"all": 3, "exact": 1, "right": 2}


def test_the_text_of_another_prompt_is_a_fault_always(soak):
    soak.args.right, soak.args.least = "none", 0.0
    soak.check_text("v1", ("v1", 0), "something new that nobody has", OWN)
    assert not soak.faults
    soak.check_text("v1", ("v1", 0), OTHERS, OWN)
    assert soak.faults["v1"] == 1


def test_failures_are_faults_but_beside_a_kill(soak):
    began = time.monotonic()
    assert not asyncio.run(soak.accept("v1", Exchange(began, 503)))
    assert soak.faults["v1"] == 1
    soak.disturbed.append([time.monotonic(), float("inf")])
    assert not asyncio.run(soak.accept("v1", Exchange(began, 200, broken="cut off")))
    assert soak.faults["v1"] == 1
    soak.disturbed[0][1] = time.monotonic()
    assert not asyncio.run(soak.accept("v1", Exchange(time.monotonic(), 503)))
    assert soak.faults["v1"] == 2


def test_figures_of_processes_are_read():
    threads, descriptors, mib = process_figures(os.getpid())
    assert min(threads, descriptors, mib) > 0
    assert children(os.getpid(), "engine") == []
