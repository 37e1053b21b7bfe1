"""Every tab of the page as a person uses it, in front of the demo model."""

import json
import re

import pytest
from browser import playback
from conftest import PASSWORD, demo
from server_process import wait_until

ANSWER_MS = 60_000


def ask(page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def figures(page, count: int):
    """Wait until `count` answers on screen are complete."""
    found = page.locator(".figures", has_text="tokens/s")
    found.nth(count - 1).wait_for(timeout=ANSWER_MS)
    assert found.count() == count
    return found


def test_a_chat_of_two_turns_keeps_what_was_said_in_the_state(url, open_page):
    page = open_page(url)
    ask(page, "My name is Tom.")
    figures(page, 1)
    ask(page, "What is my name?")
    second = figures(page, 2).nth(1).inner_text()
    assert "Tom" in page.locator(".answer").nth(1).inner_text()
    assert int(re.search(r"(\d+) from the state", second)[1]) > 10
    page.reload()
    assert page.locator(".turn").count() == 2, "a chat is kept in the browser"


def test_stop_in_mid_stream_ends_the_row_and_the_chat_goes_on(server, url, open_page):
    page = open_page(url)
    page.get_by_text("Sampling").click()
    page.locator("input[name=max_tokens]").fill("2000")
    page.locator("input[name=temperature]").fill("1.2")
    ask(page, "Tell me a long story about a fox and a bear and a wolf.")
    page.locator(".answer p").first.wait_for(timeout=ANSWER_MS)
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    wait_until(lambda: server.engine_stats()["sequences_running"] == 0, 5, "the row ends")
    said = page.locator(".answer").first.inner_text()
    assert said
    assert "≈" in page.locator(".figures").first.inner_text(), "nobody counted its tokens"
    ask(page, "My name is Ann. What is my name?")
    figures(page, 2)
    assert page.locator(".answer").first.inner_text() == said


def test_sampling_controls_go_into_the_request(url, open_page):
    page = open_page(url)
    page.get_by_text("Sampling").click()
    for name, default, value in (("min_p", "0", "0.05"), ("repetition_penalty", "1", "1.1"), ("max_tokens", "8192", "4")):
        page.locator(f"input[name={name}][placeholder='{default}']").fill(value)
    page.locator("input[name=top_p]").fill("5")  # out of range: not sent
    with page.expect_request("**/multi_state/chat/completions") as asked:
        ask(page, "Hello!")
    body = asked.value.post_data_json
    assert (body["min_p"], body["repetition_penalty"], body["max_tokens"]) == (0.05, 1.1, 4)
    assert body.keys().isdisjoint({"temperature", "top_p", "top_k"})
    figures(page, 1)


def test_regenerate_and_edit_branch_without_reading_again(url, open_page):
    page = open_page(url)
    ask(page, "My name is Ben.")
    figures(page, 1)
    ask(page, "What is my name?")
    figures(page, 2)
    read = re.search(r"(\d+) read", page.locator(".figures").nth(1).inner_text())[1]
    page.get_by_role("button", name="Regenerate").nth(1).click()
    page.get_by_text("2 / 2").wait_for()
    page.locator(".figures", has_text=f"{read} read").nth(0).wait_for(timeout=ANSWER_MS)
    figures(page, 2)
    assert f"{read} read" in page.locator(".figures").nth(1).inner_text(), "only the new message is read"
    page.get_by_role("button", name="Edit").nth(1).click()
    assert page.get_by_label("Message").input_value() == "What is my name?"
    ask(page, "Who are you?")
    page.get_by_text("3 / 3").wait_for()
    figures(page, 2)
    page.get_by_role("button", name="Previous branch").click()
    page.get_by_text("2 / 3").wait_for()


def test_a_turn_that_the_server_refused_is_tried_again_in_its_place(url, open_page):
    page = open_page(url)
    refuse = {"status": 429, "json": {"error": {"message": "the queue is full"}}, "headers": {"Retry-After": "7"}}
    page.route("**/multi_state/**", lambda route: route.fulfill(**refuse), times=1)
    ask(page, "My name is Tom.")
    page.locator(".turn .error", has_text="the queue is full").wait_for()
    assert "7 s" in page.locator(".turn .error").inner_text()
    page.get_by_role("button", name="Try again").click()
    figures(page, 1)
    assert page.locator(".branches").count() == 0, "nothing stands beside it"
    page.route("**/multi_state/**", lambda route: route.abort(), times=1)
    ask(page, "And my name?")
    page.locator(".turn .error", has_text="server does not answer").wait_for()


def test_thoughts_that_lead_to_no_answer_are_shown(open_page):
    def thinks(_: dict):
        yield {"choices": [{"index": 0, "delta": {"content": "> hm, let me see"}}]}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": {"completion_tokens": 4}}

    with playback(thinks) as address:
        page = open_page(address)
        page.get_by_text("Think first").click()
        ask(page, "Why?")
        figures(page, 1)
        assert page.locator(".thought-text").inner_text() == "hm, let me see"
        page.get_by_text("there is no answer").wait_for()


def test_on_a_phone_the_list_of_chats_waits_behind_a_button(url, open_page):
    page = open_page(url, viewport={"width": 390, "height": 844})
    ask(page, "My name is Tom.")
    figures(page, 1)
    assert not page.locator(".side").is_visible()
    lid = page.get_by_role("button", name="Chats My name is Tom.")
    lid.click()
    assert lid.get_attribute("aria-expanded") == "true"
    page.get_by_role("button", name="New chat", exact=True).click()
    page.locator(".welcome").wait_for()
    assert not page.locator(".side").is_visible()


def test_a_board_of_64_rows_runs_to_its_end(url, open_page, tmp_path):
    page = open_page(url + "#board")
    page.get_by_text("Sampling").click()
    page.locator("input[name=max_tokens]").fill("12")
    page.get_by_role("button", name="Run").click()
    page.get_by_text("64 finished").wait_for(timeout=ANSWER_MS)
    assert page.locator(".cell.done").count() == 64
    assert page.locator(".totals").inner_text().count("≈") == 0, "the server's own count at the end"
    page.locator(".cell").nth(5).click()
    assert page.locator("dialog .zoomed").inner_text()
    page.keyboard.press("Escape")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "board.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "board.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(64))
    assert all(line["text"] and line["finish_reason"] in ("stop", "length") for line in lines)


def test_a_board_is_stopped_and_its_rows_end(server, url, open_page):
    page = open_page(url + "#board")
    page.get_by_label("Copies").fill("16")
    page.get_by_text("Sampling").click()
    page.locator("input[name=max_tokens]").fill("4000")
    page.get_by_text("Chat template").click()
    page.get_by_role("button", name="Run").click()
    page.locator(".cell.live").nth(15).wait_for(timeout=ANSWER_MS)
    page.get_by_role("button", name="Stop").click()
    wait_until(lambda: server.engine_stats()["sequences_running"] == 0, 5, "the rows end")


def test_a_tree_branches_at_any_node_and_compares(url, open_page):
    page = open_page(url)
    ask(page, "My name is Tom.")
    figures(page, 1)
    ask(page, "I have a red ball.")
    figures(page, 2)
    page.get_by_role("tab", name="Tree").click()
    page.locator(".node", has_text="My name is Tom.").locator("button.name").click()
    page.get_by_label("Branches", exact=True).fill("3")
    page.get_by_label("Message").fill("What is my name?")
    page.get_by_role("button", name="Branch", exact=True).click()
    page.locator(".column .figures", has_text="tokens/s").nth(2).wait_for(timeout=ANSWER_MS)
    assert page.locator(".column").count() == 3
    assert all("Tom" in text for text in page.locator(".column .answer").all_inner_texts())
    page.get_by_label("Compare").nth(1).check()
    assert page.locator(".column").count() == 4
    page.get_by_role("button", name="Open in chat").first.click()
    page.locator("#view-chat .turn").nth(1).wait_for()


def test_branches_are_stopped_together(server, url, open_page):
    page = open_page(url + "#tree")
    page.get_by_text("Sampling").click()
    page.locator("input[name=max_tokens]").fill("2000")
    page.get_by_label("Message").fill("Tell me a long story about a fox and a bear and a wolf.")
    page.keyboard.press("Enter")
    page.locator(".column .answer p").first.wait_for(timeout=ANSWER_MS)
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Stop").wait_for(state="hidden")
    wait_until(lambda: server.engine_stats()["sequences_running"] == 0, 5, "the rows end")


def test_a_translation_stands_beside_its_text(url, open_page):
    page = open_page(url + "#translate")
    page.get_by_label("Text").fill("Good morning!\n\nThe cat sleeps.")
    page.locator("label.field select").nth(1).select_option("zh-CN")
    page.get_by_role("button", name="Translate", exact=True).click()
    page.locator(".pair").nth(1).wait_for(timeout=ANSWER_MS)
    pairs = page.locator(".pair").all_inner_texts()
    assert len(pairs) == 2
    assert all(re.search("[一-鿿]", pair) for pair in pairs)
    page.get_by_role("button", name="curl").click()
    assert "batch-translate" in page.locator("pre.command").inner_text()


def test_one_paragraph_that_fails_leaves_the_others_theirs(url, open_page):
    page = open_page(url + "#translate")
    items = [
        {"detected_source_lang": "en", "text": "早上好"},
        {"detected_source_lang": "en", "text": "Bad", "error": "no room"},
    ]
    page.route("**/batch-translate", lambda route: route.fulfill(json={"translations": items}))
    page.get_by_label("Text").fill("Good\nBad")
    page.get_by_role("button", name="Translate", exact=True).click()
    page.locator(".pair.failed", has_text="no room").wait_for()
    assert page.locator(".pair").count() == 2


def test_sessions_are_forked_exported_imported_resumed_and_deleted(server, url, open_page, tmp_path):
    body = {"contents": ["User: My name is Zoe.\n\nAssistant:"], "session_id": "page-zoe", "max_tokens": 24}
    assert server.post(body, "/state/chat/completions")[0] == 200
    page = open_page(url + "#sessions")

    def row(name: str):
        return page.locator("tbody tr", has=page.get_by_role("rowheader", name=name, exact=True))

    row("page-zoe").get_by_role("button", name="Fork").click()
    page.locator("dialog input").fill("page-zoe-2")
    page.locator("dialog button.primary").click()
    row("page-zoe-2").wait_for()
    with page.expect_download() as download:
        row("page-zoe-2").get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "page-zoe-3.rwkvstate")
    page.locator("input[type=file]").set_input_files(tmp_path / "page-zoe-3.rwkvstate")
    row("page-zoe-3").wait_for()
    row("page-zoe-2").get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Yes, do it").click()
    row("page-zoe-2").wait_for(state="detached")
    assert server.post({"session_id": "page-zoe-2"}, "/state/delete")[0] == 404
    row("page-zoe").get_by_role("button", name="Resume").click()
    page.get_by_text("goes on from a kept session").wait_for()
    ask(page, "What is my name?")
    figures(page, 1)
    assert "Zoe" in page.locator(".answer").inner_text()
    listed = server.post({"session_id": "page-zoe"}, "/state/status")[1]["sessions"][0]
    assert listed["version"] == 1, "the session itself stays as it was"


def test_a_session_goes_back_to_the_version_that_was_chosen(server, url, open_page):
    for turn in range(1, 4):
        body = {"contents": [f"User: Turn {turn}.\n\nAssistant:"], "session_id": "page-old", "max_tokens": 2}
        assert server.post(body, "/state/chat/completions")[1]["session"]["version"] == turn
    page = open_page(url + "#sessions")
    tokens = [server.post({"session_id": "page-old"}, "/state/status")[1]["sessions"][0]["tokens"]]
    row = page.locator("tbody tr", has=page.get_by_role("rowheader", name="page-old", exact=True))
    row.get_by_role("button", name="Rewind").click()
    page.locator("dialog select").wait_for()
    offered = page.locator("dialog select option").all_inner_texts()
    assert offered == ["3 (newest)", "2"], "as many as the server keeps"
    assert page.locator("dialog select").input_value() == "2"
    page.locator("dialog button.primary").click()
    row.locator("td", has_text="4").first.wait_for()
    session = server.post({"session_id": "page-old"}, "/state/status")[1]["sessions"][0]
    assert session["version"] == 4
    assert session["tokens"] < tokens[0]


def test_while_the_engine_starts_the_figures_say_so(open_page):
    answers = {"/stats": {"engine": {"phase": "loading", "model": "demo"}}}
    with playback(lambda _: iter(()), answers) as address:
        page = open_page(address + "#server")
        page.locator(".error", has_text="loading").wait_for()
        page.locator(".facts", has_text="phase").wait_for()
        page.wait_for_timeout(1200)
        assert not re.search("NaN|undefined", page.locator("main").inner_text())


def test_charts_move_while_rows_run(server, url, open_page):
    page = open_page(url + "#server")
    page.locator(".u-legend").nth(5).wait_for()
    model = page.locator(".facts", has_text="fingerprint")
    model.get_by_text("ready", exact=True).wait_for()
    before = page.locator("dd", has_text=re.compile(r"^[\d,]+$")).all_inner_texts()
    assert server.post({"contents": ["Once upon a time"] * 4, "max_tokens": 30})[0] == 200
    wait_until(lambda: page.locator("dd", has_text=re.compile(r"^[\d,]+$")).all_inner_texts() != before, 10, "the figures move")
    assert page.locator(".charts canvas").count() == 7


def test_with_a_password_the_page_asks_once_and_forgets_it_with_the_tab(browser, open_page, tmp_path_factory):
    with demo(tmp_path_factory.mktemp("locked"), PASSWORD) as locked:
        page = open_page(f"http://127.0.0.1:{locked.port}/")
        page.locator("dialog input[type=password]").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("That was not right").wait_for()
        page.locator("dialog input[type=password]").fill(PASSWORD)
        page.keyboard.press("Enter")
        ask(page, "My name is Tom.")
        figures(page, 1)
        for tab in ("Sessions", "Server"):
            page.get_by_role("tab", name=tab).click()
        page.locator(".charts canvas").nth(5).wait_for()
        assert page.evaluate("JSON.stringify(localStorage)").count(PASSWORD) == 0
        assert page.evaluate("Object.values(sessionStorage)") == [PASSWORD]
        page.get_by_role("button", name="curl").click()
        assert PASSWORD not in page.locator("pre.command").inner_text()
        page.close()


def test_tabs_and_dialogs_work_by_keyboard_and_in_chinese(url, open_page):
    page = open_page(url, locale="zh-CN")
    page.get_by_role("tab", name="对话").focus()
    for name in ("批量", "分支树", "翻译", "会话", "服务器", "对话"):
        page.keyboard.press("ArrowRight")
        assert page.get_by_role("tab", name=name).get_attribute("aria-selected") == "true"
    page.get_by_role("button", name="Switch to English").click()
    page.get_by_role("tab", name="Sessions").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_view_scrolls_sideways_and_axe_finds_nothing_serious(url, open_page, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(url, viewport={"width": width, "height": 844}, color_scheme=scheme)
    page.locator(".pulse[data-state=engine_ready]").wait_for()
    for name in ("chat", "board", "tree", "translate", "sessions", "server"):
        page.goto(f"{url}#{name}")
        page.locator(f"#view-{name}").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        found = axe.run(page).response["violations"]
        serious = [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in found if v["impact"] in ("serious", "critical")]
        assert not serious, (name, serious)
