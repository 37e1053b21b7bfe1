"""Translation as a browser extension uses it: languages, paragraphs, placeholders, many requests at once, access."""

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import TINY, random_tensors
from scripted_server import ANSWER, PASSWORD, start
from server_process import ServerProcess, wait_until

PATH = "/translate/v1/batch-translate"
V1 = "/v1/chat/completions"
EXTENSION = {"Origin": "chrome-extension://bpoadfkcbjbfhfodiogcnhhhpibjhbnh", "Content-Type": "application/json"}
ENGLISH = "This is a sentence in plain English."
ELSEWHERE = {"X-Forwarded-For": "203.0.113.5"}


def translate(server: ServerProcess, texts: list[str], source="en", target="zh-CN", path=PATH, **more) -> list[dict]:
    """The items of an answer that has the right form."""
    body = {"source_lang": source, "target_lang": target, "text_list": texts, **more}
    status, answer, headers = server.request("POST", path, body, EXTENSION)
    assert status == 200, answer
    assert headers["access-control-allow-origin"] == "*"
    assert list(answer) == ["translations"]
    assert len(answer["translations"]) == len(texts)
    assert all(list(item)[:2] == ["detected_source_lang", "text"] for item in answer["translations"])
    return answer["translations"]


def texts_of(items: list[dict]) -> list[str]:
    return [item["text"] for item in items]


def test_what_the_extension_asks(scripted):
    """Contract 9, line 28: preflight, auto, blank texts, placeholders, 50 texts."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    status, _, headers = scripted.request(
        "OPTIONS", PATH, headers={**EXTENSION, **asked, "Access-Control-Request-Private-Network": "true"}
    )
    assert status == 204
    assert headers["access-control-allow-origin"] == "*"
    assert headers["access-control-allow-headers"] == "content-type"
    assert headers["access-control-allow-private-network"] == "true"
    items = translate(
        scripted, ["Hello, this is a sentence.", "", " \n ", "Click <b0>here</b0> or {0}.", "42 %"], source="auto"
    )
    assert {item["detected_source_lang"] for item in items} == {"en"}
    assert texts_of(items) == [ANSWER, "", " \n ", f"{ANSWER} <b0>{ANSWER}</b0> {ANSWER} {{0}}.", "42 %"]
    assert len(set(texts_of(translate(scripted, [f"Text number {i}." for i in range(50)])))) == 1
    assert translate(scripted, []) == []


def test_detected_languages_are_reported(scripted):
    """Contract 1.8: what was found with auto, else the code as it was given."""
    items = translate(scripted, ["Guten Morgen, wie geht es Ihnen heute?", "今日は良い天気です。", "这是中文"], "auto", "en")
    assert [item["detected_source_lang"] for item in items] == ["de", "ja", "zh-CN"]
    assert translate(scripted, ["a"], "zh-Hant", "en")[0]["detected_source_lang"] == "zh-Hant"
    items = translate(scripted, [ENGLISH, "Das ist ein deutscher Satz über Wetter."], "auto", "en")
    assert texts_of(items) == [ENGLISH, ANSWER], "what is in the target's language already stays"


def test_each_text_gets_the_answer_to_its_own_prompt(random_model):
    """Contract 2.5: the order is kept, and the prompt is the one of the reference; zh-TW has words of its own."""
    texts = ["The rain had stopped.", "你好", "A cat darted from the alley, and then it was gone.", "x"]
    for target, name in [("zh-CN", "Chinese"), ("zh-TW", "Traditional Chinese")]:
        found = texts_of(translate(random_model, texts, "en", target))
        for text, translation in zip(texts, found, strict=True):
            body = {"contents": [f"English: {text}\n\n{name}:"], "temperature": 0, "alpha_presence": 0, "alpha_frequency": 0}
            stops = ["\n\n", "\nEnglish:", f"\n{name}:"]
            answer = random_model.post({**body, "max_tokens": 20, "stop_tokens": stops}, V1)[1]
            right = answer["choices"][0]["message"]["content"].strip()
            assert right
            assert translation.startswith(right), "the translation may be longer than these 20 tokens"


def test_paragraphs_and_their_gaps(scripted):
    """Contract 1.8: cut at blank lines, joined again exactly."""
    text = "  One.\nStill one.\n \n\nTwo.\r\n\r\n3\n\n\nFour {1}\n"
    assert texts_of(translate(scripted, [text])) == [
        f"  {ANSWER}\n \n\n{ANSWER}\r\n\r\n3\n\n\n{ANSWER} {{1}}\n"
    ]  # fmt: skip


def test_placeholders_come_back(scripted, random_model):
    """Contract 1.8: also those that only the caller knows; a text that cannot be kept whole comes back as it was."""
    text = "Dear %NAME%, {0} of {1} <b0>files</b0> are {{2}} done, {0}"
    marks = ["%NAME%", "{0}", "{1}", "<b0>", "</b0>", "{{2}}", "{0}"]
    for server in (scripted, random_model):
        (found,) = texts_of(translate(server, [text], placeholders=["%NAME%"]))
        assert found != text
        for mark in marks:
            assert found.count(mark) == text.count(mark)
        assert texts_of(translate(server, [text], placeholders=["%NAME%", "", "{", "b"])) == [found]
    assert texts_of(translate(scripted, ["{0}", "<b0></b0>"])) == ["{0}", "<b0></b0>"]
    assert texts_of(translate(scripted, ["Say it."], placeholders=["早上"])) == ["Say it."], "a foreign mark in the answer"


def test_sentences_seen_before_are_remembered(scripted):
    """Nothing is generated for them; other languages and other placeholders are other sentences."""

    def generated() -> int:
        time.sleep(0.5)  # ten times the age of the figures
        return scripted.engine_stats()["generation_tokens_total"]

    texts = ["A menu entry.", "Another one. {0}", "A menu entry."]
    first = translate(scripted, texts)
    before = generated()
    assert translate(scripted, texts) == first
    assert translate(scripted, texts[::-1]) == first[::-1]
    assert generated() == before
    translate(scripted, texts, target="ja")
    wait_until(lambda: generated() > before, 5, "others are generated")


def test_equal_paragraphs_are_translated_once(scripted):
    time.sleep(0.5)  # ten times the age of the figures
    before = scripted.engine_stats()["prompt_tokens_total"]
    translate(scripted, ["Exactly this sentence.\n\nExactly this sentence."] * 100)
    time.sleep(0.5)
    assert scripted.engine_stats()["prompt_tokens_total"] - before < 20


def test_one_text_that_fails_does_not_cost_the_others_theirs(folder):
    """Contract 1.8: it comes back as it was."""
    with ServerProcess("--http-workers", "1", folder=folder, env={"RWKV_BATCH_FAULT": "row:1"}) as server:
        items = translate(server, ["One.", "Two.", "Three."], target="de")
        assert items[0] == {"detected_source_lang": "en", "text": "One.", "error": "the logits of this row were not finite"}
        assert all(item["text"].startswith("w0 w1") and "error" not in item for item in items[1:])
        assert texts_of(translate(server, ["One."], target="de"))[0].startswith("w0 w1"), "a failure is not remembered"


def test_a_long_translation_is_blanks_then_json(server):
    """As other whole answers are. It can be stopped by the id of its call, and when all texts fail the call does."""
    assert texts_of(translate(server, ["word " * 16], target="de"))[0].startswith("w0 w1")
    found = []
    body = {"source_lang": "en", "target_lang": "de", "text_list": ["other " * 4000, "more " * 4000]}
    asking = threading.Thread(target=lambda: found.append(server.post(body, PATH)))
    asking.start()
    wait_until(lambda: server.get("/v1/server/status")[1]["active_requests"], 3, "it runs")
    active = server.get("/v1/server/status")[1]["active_requests"]
    assert {live["endpoint"] for live in active} == {PATH}
    call_id = active[0]["request_id"].partition("-")[0]
    stopped = server.post({"request_id": call_id}, "/v1/server/stop")[1]
    assert len(stopped["requests"]) == len(active)
    asking.join(60)
    assert found[0][1] == {"error": "Request cancelled"}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "model": "m"}, "/v1/chat/completions"),
        ({"text_list": ["a"]}, "Missing target_lang"),
        ({"target_lang": "de"}, "Missing text_list"),
        ({"target_lang": "xx", "text_list": []}, "target_lang"),
        ({"target_lang": "auto", "text_list": []}, "target_lang"),
        ({"target_lang": "de", "source_lang": "qq", "text_list": []}, "source_lang"),
        ({"target_lang": "de", "text_list": ["a", 5]}, "text_list[1]"),
        ({"target_lang": "de", "text_list": {"a": 1}}, "text_list"),
        ({"target_lang": "de", "text_list": ["a"] * 4097}, "4096 texts"),
        ({"target_lang": "de", "text_list": ["a"], "placeholders": ["xy"] * 257}, "256"),
        ({"target_lang": "de", "text_list": ["a"], "placeholders": ["a" * 257]}, "placeholders[0]"),
        ({"target_lang": "de", "text_list": ["a" * 1_100_000], "placeholders": ["a" * 64]}, "for so much text"),
        ({"target_lang": "de", "text_list": ["\n\n".join(f"a{i}" for i in range(4097))]}, "4096 different paragraphs"),
        ({"target_lang": "de", "text_list": ["a\n\n" * 40_000]}, "too many paragraphs"),
        ({"target_lang": ["de"], "text_list": ["a"]}, "target_lang"),
    ],
)
def test_bodies_that_cannot_work(scripted, body, word):
    status, answer = scripted.post(body, PATH)
    assert (status, list(answer)) == (400, ["error"])
    assert word in answer["error"]


def test_a_translation_body_is_told_its_url(scripted):
    status, answer = scripted.post({"source_lang": "en", "target_lang": "de", "text_list": ["a"]}, V1)
    assert status == 400
    assert PATH in answer["error"]


def test_other_names_and_forms(scripted):
    """Contract 1.8: the older path, a name for a code, and kiss-translator's fields."""
    assert texts_of(translate(scripted, ["Hello."], "English", "Chinese", path="/v1/immersive_translate")) == [ANSWER]
    one = scripted.post({"text": "Hello there.", "from": "auto", "to": "zh-CN"}, PATH)
    assert one == (200, {"text": ANSWER, "src": "en", "from": "en"})
    many = scripted.post({"texts": ["Hello.", ""], "from": "en", "to": "zh-CN"}, PATH)
    assert many == (200, {"translations": [{"text": ANSWER, "src": "en"}, {"text": "", "src": "en"}]})


@pytest.mark.parametrize("nothing", ["", " ", "auto", None])
def test_no_source_is_auto(scripted, nothing):
    """Decision (p): the first version of kiss-translator sends "" for it, and hides texts `from` its target."""
    text = "Good morning, this is a sentence."
    answer = scripted.post({"text": text, "from": nothing, "to": "zh-CN"}, PATH)
    assert answer == (200, {"text": ANSWER, "src": "en", "from": "en"})
    assert scripted.post({"text": text, "from": nothing, "to": "en"}, PATH)[1] == {"text": text, "src": "en", "from": "en"}
    assert translate(scripted, [text], nothing)[0]["detected_source_lang"] == "en"


def test_several_texts_under_the_name_of_one(scripted):
    answer = scripted.post({"text": ["Hello.", "There."], "from": "en", "to": "zh-CN"}, PATH)
    assert answer == (200, {"translations": [{"text": ANSWER, "src": "en"}] * 2})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"text": "a", "from": "qq", "to": "de"}, "from"),
        ({"text": "a", "from": "en", "to": "qq"}, "to"),
        ({"text": "a", "from": "en"}, "to"),
        ({"text": {"a": 1}, "to": "de"}, "text"),
        ({"texts": ["a", 5], "to": "de"}, "texts[1]"),
        ({"texts": ["a"] * 4097, "to": "de"}, "texts"),
        ({"texts": ["a\n\n" * 40_000], "to": "de"}, "texts"),
        ({"text": "a", "to": ["de"]}, "to"),
    ],
)
def test_errors_name_the_field_that_was_sent(scripted, body, field):
    status, answer = scripted.post(body, PATH)
    assert status == 400
    assert answer["error"].removeprefix("invalid request: ").removeprefix("Missing ").partition(":")[0] == field


def test_short_foreign_texts_are_translated(scripted):
    """Decision (p): English is only assumed for them."""
    texts = ["Inicio", "Productos", "Guten Morgen", "Merhaba", "OK", "½"]
    items = translate(scripted, texts, "auto", "en")
    assert texts_of(items) == [ANSWER] * 5 + ["½"]
    assert all(item["detected_source_lang"] != "en" for item in items[:5])
    assert texts_of(translate(scripted, ["臺灣"], "auto", "zh-CN")) == [ANSWER]


def test_access(locked_scripted, folder):
    """Decision (e): open to this host, else the password as header, body field or ?token=; --open-translate opens it."""
    body = {"source_lang": "en", "target_lang": "zh-CN", "text_list": ["Hello."]}
    right = {"translations": [{"detected_source_lang": "en", "text": ANSWER}]}

    def ask(path=PATH, headers=None, server=locked_scripted, **more):
        status, answer, found = server.request("POST", path, {**body, **more}, headers)
        assert found["access-control-allow-origin"] == "*"
        return status, answer

    assert ask() == (200, right)
    for header in ("X-Forwarded-For", "x-real-ip", "Forwarded"):
        assert ask(headers={header: "127.0.0.1"})[0] == 401
    assert ask(headers={**ELSEWHERE, "Authorization": f"Bearer {PASSWORD}"}) == (200, right)
    assert ask(headers=ELSEWHERE, password=PASSWORD) == (200, right)
    assert ask(f"{PATH}?token={PASSWORD}", ELSEWHERE) == (200, right)
    assert ask(f"{PATH}?token=wrong", ELSEWHERE)[0] == 401
    assert ask(f"{PATH}?token=wrong", ELSEWHERE, password=PASSWORD)[0] == 401
    assert locked_scripted.post({"contents": ["a"]}, f"{V1}?token={PASSWORD}")[0] == 401, "in the URL for translation only"
    assert PASSWORD not in locked_scripted.output
    with ServerProcess("--http-workers", "1", "--open-translate", "--host", "127.0.0.1", folder=folder,
                       env={"RWKV_BATCH_PASSWORD": PASSWORD}, wait=False) as server:  # fmt: skip
        server.headers = {"Authorization": f"Bearer {PASSWORD}"}
        server.wait_ready()
        assert ask(headers=ELSEWHERE, server=server)[0] == 200
        assert server.post({"contents": ["a"]}, V1)[0] == 401


# --- a browser that reads a page ---


def page(number: int, num_paragraphs: int) -> list[str]:
    """Paragraphs of a page, all different, every second with placeholders."""
    return [
        f"Page {number}, item {i}: click <b0>here</b0> for {{{i}}}." if i % 2 else f"Page {number} has a line {i} of text."
        for i in range(num_paragraphs)
    ]


def read_pages(server: ServerProcess, first: int, num_pages: int, num_paragraphs: int, parallel: int) -> float:
    """Translate pages as the extension does, so many requests at a time; returns seconds for a paragraph."""

    def read(number: int) -> None:
        texts = page(number, num_paragraphs)
        connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        body = {"source_lang": "auto", "target_lang": "zh-CN", "text_list": texts}
        connection.request("OPTIONS", PATH, headers={**EXTENSION, "Access-Control-Request-Method": "POST"})
        preflight = connection.getresponse()
        preflight.read()
        assert preflight.status == 204
        connection.request("POST", PATH, json.dumps(body), EXTENSION)
        reply = connection.getresponse()
        assert (reply.status, reply.headers["Access-Control-Allow-Origin"]) == (200, "*")
        items = json.loads(reply.read())["translations"]
        connection.close()
        assert len(items) == len(texts)
        for i, (text, item) in enumerate(zip(texts, items, strict=True)):
            assert item["detected_source_lang"] == "en"
            assert item["text"] != text
            for mark in ("<b0>", "</b0>", f"{{{i}}}"):
                assert item["text"].count(mark) == text.count(mark), (text, item)

    began = time.monotonic()
    with ThreadPoolExecutor(parallel) as pool:
        for _ in pool.map(read, range(first, first + num_pages)):
            pass
    return (time.monotonic() - began) / (num_pages * num_paragraphs)


def simulate(server: ServerProcess, num_paragraphs: int) -> tuple[float, float]:
    """Seconds for a paragraph with one and with six requests at a time."""
    read_pages(server, 0, 1, 2, 1)
    alone = read_pages(server, 100, 2, num_paragraphs, 1)
    together = read_pages(server, 200, 6, num_paragraphs, 6)
    print(
        f"{num_paragraphs} paragraphs a request: {alone * 1000:.1f} ms each alone, {together * 1000:.1f} ms with six at a time"
    )
    assert not [line for line in server.output.splitlines() if " 429 " in line]
    return alone, together


@pytest.mark.long
def test_six_requests_of_twenty_paragraphs(folder):
    """Contract 9, line 28: as many back in order, placeholders whole, no 429, and less time for each than one after another."""
    checkpoint = folder / "bytes.pth"
    torch.save(random_tensors(TINY, 256), checkpoint)  # 256 bytes: steps of few rows cost little more than those of one
    with start(checkpoint, folder, "--slots", "128", "--translate-ratio", "0.5") as server:
        alone, together = simulate(server, 20)
    assert together < alone


@pytest.mark.long
@pytest.mark.parametrize("num_paragraphs", [20, 50])
def test_six_requests_where_a_step_costs_the_same_for_any_number_of_rows(folder, num_paragraphs):
    """The same as on a GPU, nearly: six at a time take less than a third."""
    with ServerProcess(folder=folder, step_ms=20) as server:
        alone, together = simulate(server, num_paragraphs)
    assert together < 0.33 * alone
