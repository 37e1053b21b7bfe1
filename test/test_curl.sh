#!/usr/bin/env bash
# Sends every curl of the users' guides (seed_curls.json) to a running server and checks what comes back.
#
#   bash test/test_curl.sh
#   BASE_URL=http://localhost:8000 PASSWORD=rwkv7_7.2b MAX_TOKENS=256 bash test/test_curl.sh
#
# Exit status: 0 all answers are right, 1 some are not, 2 there is no server. The bodies go out as they are written, but for
# password and max_tokens. A server without a password takes them too.
set -u

BASE_URL=${BASE_URL:-http://localhost:8000}
BASE_URL=${BASE_URL%/}
export PASSWORD=${PASSWORD-rwkv7_7.2b}
export MAX_TOKENS=${MAX_TOKENS:-256}
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2
WORK=$(mktemp -d) || exit 2
trap 'rm -rf "$WORK"' EXIT

if ! curl -sS --max-time 10 -o "$WORK/health" "$BASE_URL/healthz"; then
    echo "no server at $BASE_URL" >&2
    exit 2
fi

# One folder for each curl: url path, arguments for curl, body.
python3 - "$WORK" <<'PYTHON' || exit 2
import json, os, pathlib, re, sys

password, max_tokens = os.environ["PASSWORD"], os.environ["MAX_TOKENS"]
for number, curl in enumerate(json.load(open("seed_curls.json", encoding="utf-8"))):
    folder = pathlib.Path(sys.argv[1], f"{number:03}")
    folder.mkdir()
    body = curl["body"].replace('"password": "rwkv7_7.2b"', f'"password": {json.dumps(password)}')
    body = re.sub(r'"max_tokens": \d+', f'"max_tokens": {int(max_tokens)}', body)
    headers = [header.replace("your-password-if-set", password) for header in curl["headers"]]
    (folder / "body").write_text(body, encoding="utf-8")
    (folder / "path").write_text(curl["path"])
    (folder / "headers").write_text("".join(header + "\n" for header in headers))
PYTHON

# Reads lines "STATUS FOLDER" and prints a line for each answer.
CHECK=$(cat <<'PYTHON'
import json, pathlib, sys


class Wrong(Exception):
    pass


def need(condition, why):
    if not condition:
        raise Wrong(why)


def parse(text):
    try:
        return json.loads(text)
    except ValueError:
        raise Wrong("not JSON") from None


def stream(text, rows):
    """The texts of a native or OpenAI stream."""
    texts, reasons = [""] * rows, {}
    blocks = "".join(line for line in text.splitlines(True) if not line.startswith(":")).split("\n\n")
    need(blocks.pop() == "", "the stream does not end with a blank line")
    events = blocks
    need(all(event.startswith("data: ") for event in events), "an event is not a data line")
    need(events[-1:] == ["data: [DONE]"] and text.count("[DONE]") == 1, "the stream does not end with one [DONE]")
    for event in map(parse, (event[6:] for event in events[:-1])):
        need(event.get("object") == "chat.completion.chunk", "wrong object in a chunk")
        for choice in event["choices"]:
            need(choice["index"] in range(rows), "no such index")
            texts[choice["index"]] += choice["delta"].get("content") or ""
            reasons[choice["index"]] = choice.get("finish_reason") or reasons.get(choice["index"])
    need(len(reasons) == rows and set(reasons.values()) <= {"stop", "length"}, "a row has no end")
    return texts


def document(answer, rows):
    """The texts of a native or OpenAI answer."""
    need(answer["object"] in ("chat.completion", "FIM.completion"), "wrong object")
    need([choice["index"] for choice in answer["choices"]] == list(range(rows)), "not as many choices as prompts")
    need(all(choice["finish_reason"] in ("stop", "length") for choice in answer["choices"]), "wrong finish_reason")
    return [choice["message"]["content"] for choice in answer["choices"]]


def translations(answer, asked):
    """The texts of a translation."""
    items = answer["translations"]
    need(len(items) == len(asked["text_list"]), "not as many texts as were sent")
    need(all(item["detected_source_lang"] == asked["source_lang"] for item in items), "wrong detected_source_lang")
    need(all(item["text"] for item in items) and not any("error" in item for item in items), "a text failed")
    return [item["text"] for item in items]


def look(status, path, asked, text):
    """What the answer holds, in a few words."""
    if path == "/state/delete":
        need(status in (200, 404) and parse(text).get("status") in ("success", "not_found"), "wrong answer")
        return parse(text)["message"]
    need(status == 200, "wrong status")
    if path == "/state/status":
        need(parse(text).get("status") == "success", "wrong answer")
        return f"{parse(text)['total_sessions']} sessions"
    rows = len(asked.get("contents") or asked.get("prefix") or asked.get("text_list") or [0])
    if asked.get("stream"):
        texts = stream(text, rows)
    else:
        texts = translations(parse(text), asked) if "text_list" in asked else document(parse(text), rows)
    need(all(isinstance(piece, str) for piece in texts), "a text is missing")
    for mark in ["<|endoftext|>"] + ["✿"] * ("prefix" in asked):
        need(not any(mark in piece for piece in texts), f"a text shows the mark {mark}")
    said = [piece for piece in texts if piece.strip()]
    empty = f" ({rows - len(said)} empty)" if len(said) < rows else ""
    begin = " ".join("".join(said[:1]).split())[:60]
    return f"rows: {rows}{empty}, characters: {sum(map(len, texts))}, {begin!r}"


counts = {"ok": 0, "FAIL": 0}
for line in sys.stdin:
    status, folder = line.split(None, 1)
    folder = pathlib.Path(folder.strip())
    path = (folder / "path").read_text()
    asked = json.loads((folder / "body").read_text(encoding="utf-8"))
    text = (folder / "answer").read_text(encoding="utf-8") if (folder / "answer").exists() else ""
    try:
        need(status != "000", "no answer")
        word, said = "ok", look(int(status), path, asked, text)
    except (Wrong, KeyError, TypeError, AttributeError) as error:
        word, said = "FAIL", f"{error if isinstance(error, Wrong) else repr(error)}: HTTP {status}, {text[:300]!r}"
    counts[word] += 1
    print(f"{word:4} {path:30} {said}", flush=True)
print(f"{counts['ok']} right, {counts['FAIL']} wrong")
sys.exit(1 if counts["FAIL"] or not counts["ok"] else 0)
PYTHON
)

for folder in "$WORK"/[0-9]*; do
    arguments=()
    while IFS= read -r header; do arguments+=(-H "$header"); done <"$folder/headers"
    status=$(curl -sS -N --max-time 600 -o "$folder/answer" -w '%{http_code}' -X POST "$BASE_URL$(cat "$folder/path")" \
        "${arguments[@]}" --data-binary "@$folder/body") || status=000
    echo "$status $folder"
done | PYTHONIOENCODING=utf-8 python3 -c "$CHECK"
exit "${PIPESTATUS[1]}"
