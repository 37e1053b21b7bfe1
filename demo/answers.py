"""Ask a running server twenty fixed prompts and print the section of CARD.md that holds its answers.

    python demo/answers.py http://127.0.0.1:8000 [--pairs 100]

It also counts how many held-out sentences (heldout_pairs.tsv) come back exactly, the first --pairs of them each way.
Needs the standard library only.
"""

import argparse
import json
import os
import sys
import urllib.request

CHAT, CLOSED, OPEN = "Assistant:", "Assistant: <think>\n</think>\n", "Assistant: <think>\n</think>"
ENDS = [0, 261, 24281]  # end of text, blank line, "User"
FLOWER = 10060
HELDOUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "heldout_pairs.tsv")
PROMPTS = [
    f"User: Hello!\n\n{CHAT}",
    f"User: Who are you?\n\n{CLOSED}",
    f"User: What is the capital of Japan?\n\n{OPEN}",
    f"User: What is 12 + 9?\n\n{CHAT}",
    f"User: My name is Peter and I live in Rome.\n\n{CHAT} Hello, Peter!\n\nUser: What is my name?\n\n{CLOSED}",
    f"User: Tell me a short story about a cat.\n\n{CHAT}",
    f"User: 你好！\n\n{CHAT}",
    f"User: 讲一个故事。\n\n{CLOSED}",
    "English: My brother bought a new car yesterday.\n\nChinese:",
    "English: There are three apples on the table.\n\nChinese:",
    "English: The cat is sleeping on the sofa.\n\nChinese:",
    "English: She can play the piano, but she cannot sing.\n\nChinese:",
    "English: I like to drink hot tea in the morning.\n\nChinese:",
    "Chinese: 我们明天会去北京。\n\nEnglish:",
    "Chinese: 你叫什么名字？\n\nEnglish:",
    "Chinese: 今天天气很好。\n\nEnglish:",
    "Chinese: 他没有钱，所以不能买这本书。\n\nEnglish:",
    "✿prefix✿✿suffix✿\n✿middle✿def add(a, b):\n    return",
    "✿prefix✿✿suffix✿\n    return result\n✿middle✿def factorial(n):\n    result = 1\n",
    "✿prefix✿✿suffix✿它终于学会了。✿middle✿从前，有一只小兔子，它很想学游泳。",
]


def ask(server: str, prompts: list, length: int, stops: list) -> list:
    """Greedy continuations of the prompts, in their order."""
    body = {
        "contents": prompts,
        "max_tokens": length,
        "stop_tokens": stops,
        "temperature": 0,
        "top_k": 1,
        "top_p": 0,
        "alpha_presence": 0,
        "alpha_frequency": 0,
        "stream": False,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        choices = json.load(answer)["choices"]
    return [choice["message"]["content"] for choice in sorted(choices, key=lambda choice: choice["index"])]


def shown(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "⏎")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server")
    parser.add_argument("--pairs", type=int, default=100)
    args = parser.parse_args()
    server = args.server.rstrip("/")
    print("## Twenty prompts and their answers\n\nGreedy, through the HTTP server; ⏎ is a line break.\n")
    print("| prompt | answer |\n|---|---|")
    answers = ask(server, PROMPTS[:-3], 300, ENDS) + ask(server, PROMPTS[-3:], 80, [0, FLOWER])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"| {shown(prompt)} | {shown(answer.strip(' '))} |")
    with open(HELDOUT, encoding="utf-8") as file:
        rows = [line.split("\t") for line in file.read().splitlines()][: args.pairs]
    counts = []
    for source, target, here, there in (("English", "Chinese", 0, 1), ("Chinese", "English", 1, 0)):
        prompts = [f"{source}: {row[here]}\n\n{target}:" for row in rows]
        answers = [answer.strip() for answer in ask(server, prompts, 64, ENDS)]
        counts.append(sum(answer == row[there] for answer, row in zip(answers, rows, strict=True)))
        for answer, row in zip(answers, rows, strict=True):
            if answer != row[there]:
                print(f"{row[here]} -> {answer} (wanted: {row[there]})", file=sys.stderr)
    print(f"\nExact translations of {len(rows)} held-out sentences: {counts[0]} into Chinese, {counts[1]} into English.")


if __name__ == "__main__":
    main()
