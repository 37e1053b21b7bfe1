"""Training text for the demo model: documents, kept ids, token shards.

    python demo/data.py heldout DATA demo/heldout_pairs.tsv   200 sentence pairs that training never sees
    python demo/data.py keep DATA DATA/keep.txt               the 8,192 ids that the model knows
    python demo/data.py heldtext DATA DATA                    the held-out shards, held-PART.npz
    python demo/data.py shards DATA DIR WORKERS               training shards for ever (train.py starts this)

DATA, the data folder, holds stories.txt.xz, novels.txt.xz, chat.jsonl.xz, en-zh.tsv.xz, code.txt.xz and the generators
tools/synth_*.py; CARD.md says what is in them.

A document is a list of (text, kind) pieces, tokenised one by one as a server would see them: WRITTEN by the model,
GIVEN to it in a prompt (no loss), or READ (a prompt from which it still learns language). Shards hold "compact" ids:
0..kept-1 are the kept ids in rising order, the rest are the other World ids in rising order. Written text is spelled
with kept ids only.
"""

import ast
import json
import lzma
import os
import random
import re
import sys
import time
import zlib
from collections import Counter
from importlib.resources import files
from multiprocessing import Process

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from demo.talk import Talk

KEPT = 8192
LONGEST = 1024  # tokens of one training sequence
SPELLED_MAX = 48  # longest kept token tried when a rare token is spelled with kept ones, in bytes
# flower, the words of FIM, think, </, ></, System, one quote mark, newlines
MARKS = (10060, 42093, 42337, 41851, 35762, 754, 5439, 40812, 441, 11, 261)  # fmt: skip
WRITTEN, GIVEN, READ = 0, 1, 2
HELDOUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "heldout_pairs.tsv")
PARTS = {  # name: workers of 14 that make it
    "own-stories": 3,
    "own-chat": 4,
    "own-pairs": 3,
    "own-fill": 1,
    "stories": 1,
    "novels": 1,
    "tatoeba": 0.4,
    "chat": 0.3,
    "code": 0.3,
}


def token_bytes() -> list:
    """The World vocabulary as a list of 65,536 byte strings; None where there is no token, b"" for id 0."""
    table = [None] * 65536
    table[0] = b""
    text = files("pyrwkv_tokenizer").joinpath("rwkv_vocab_v20230424.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        token = ast.literal_eval(line[line.index(" ") : line.rindex(" ")])
        table[int(line[: line.index(" ")])] = token.encode() if isinstance(token, str) else token
    return table


def spell(word: bytes, known: dict) -> list:
    """Split bytes into kept tokens, longest match first."""
    out, at = [], 0
    while at < len(word):
        for size in range(min(SPELLED_MAX, len(word) - at), 0, -1):
            if (token := known.get(word[at : at + size])) is not None:
                out.append(token)
                at += size
                break
    return out


class Encoder:
    """Turns documents into compact ids."""

    def __init__(self, keep: list):
        from pyrwkv_tokenizer import RWKVTokenizer

        self.world = RWKVTokenizer()
        table = token_bytes()
        rest = sorted(set(range(65536)) - set(keep))
        self.keep, self.rest = sorted(keep), rest
        self.compact = np.empty(65536, np.uint16)  # World id -> compact id
        self.compact[np.array(self.keep + rest)] = np.arange(65536)
        known = {table[i]: n for n, i in enumerate(self.keep) if table[i]}
        self.pieces = {len(keep) + n: spell(table[i], known) if table[i] else [] for n, i in enumerate(rest)}

    def text(self, text: str, spelled: bool) -> list:
        ids = self.compact[self.world.encode(text)]
        if not spelled or not len(ids) or ids.max() < len(self.keep):
            return ids.tolist()
        out = []
        for i in ids.tolist():
            out += [i] if i < len(self.keep) else self.pieces[i]
        return out

    def document(self, document: list, rng: random.Random) -> tuple:
        """(compact ids with the end mark 0, flags of the ids without loss); a quarter of the documents also start with 0."""
        whole = rng.random() < 0.6  # prompts as a server sends them, or spelled
        ids = [0] if rng.random() < 0.25 else []
        given = [1] * len(ids)
        for text, kind in document:
            if text:
                new = self.text(text, spelled=kind == WRITTEN or not whole)
                ids += new
                learn = {WRITTEN: 0, GIVEN: len(new), READ: 2}[kind]  # ids without loss at the start of the piece
                given += [1] * min(learn, len(new)) + [0] * (len(new) - learn)
        return [*ids, 0], [*given, 0]


# ---------------------------------------------------------------------------------------------- documents


def one_line_breaks(text: str) -> str:
    """A blank line ends a turn, so none may stand inside one."""
    return re.sub(r"\n\s*\n+", "\n", text.replace("\r", "")).strip()


SYSTEMS = [
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "You are a kind teacher. Answer in one or two sentences.",
    "Answer briefly.",
    "You are a translator.",
    "You are a small language model called RWKV.",
    "你是一个友好的助手。",
    "请用简单的话回答。",
    "You are a helpful AI assistant. Please answer the user's questions.",
    "You talk to children in simple words.",
]


def noisy(text: str, rng: random.Random) -> str:
    """A user's text as people type it."""
    if "\n" in text or len(text) > 160:
        return text
    if rng.random() < 0.15:
        text = re.sub(r"^(What|Who|Where) is ", r"\1's ", text)
    if rng.random() < 0.12 and text[:2] != "I ":
        text = text[0].lower() + text[1:]
    if rng.random() < 0.04 and not re.search(r"[:\"]", text):
        text = text.lower()
    if rng.random() < 0.15 and re.search(r"[\w\u4e00-\u9fff][.?!。？！]$", text):
        text = text[:-1]
    if rng.random() < 0.3:
        text = re.sub(r"(?<=\d) ([-+*×=]) (?=[\d?])", r"\1", text)
    if rng.random() < 0.05 and re.match(r"(Tell|Write|Give|Name|Explain|Translate|Count|List)", text):
        text = rng.choice(["Please ", "Can you please ", "Could you "]) + text[0].lower() + text[1:]
    return text


def thought(text: str, chinese: bool, rng: random.Random) -> str:
    text = text.split("\n")[0][:80]
    if chinese:
        return f"用户说：“{text}”" + rng.choice(["我来简单地回答。", "我应该回答得简短一点。"])
    return f'The user says: "{text}" ' + rng.choice(["I will give a short answer.", "I should answer in simple words."])


def chat_document(messages: list, rng: random.Random, user: int = GIVEN) -> list:
    """User and Assistant blocks, with the ways in which servers open the Assistant block."""
    turns = [one_line_breaks(m) for m in messages]
    chinese = bool(re.search(r"[\u4e00-\u9fff]", turns[0]))
    head = f"System: {rng.choice(SYSTEMS)}\n\n" if rng.random() < 0.1 else ""
    style, every = rng.random(), rng.random() < 0.2
    document = []
    for n in range(0, len(turns) - 1, 2):
        ask, answer = noisy(turns[n], rng), turns[n + 1]
        last = n >= len(turns) - 2
        if not (last or every) or style < 0.42:
            tail, start = "", " "
        elif style < 0.76:
            tail, start = " <think>\n</think>", "\n"
        elif style < 0.86:
            tail, start = " <think></think", rng.choice([">\n", ">\n", "> "])
        elif style < 0.93:
            tail, start = " <think>\n</think", ">\n"
        else:
            ask += "" if chinese else rng.choice(["", " (think)", " (think a bit)", " (think a lot)"])
            tail, start = " <think", f">\n{thought(turns[n], chinese, rng)}\n</think>\n"
            if chinese and rng.random() < 0.3:
                tail, start = " <think>嗯", f"，{thought(turns[n], True, rng)}\n</think>\n"
        document += [(f"{head}User: {ask}\n\nAssistant:", user), (tail, GIVEN), (start + answer, WRITTEN)]
        head = "\n\n"
    if rng.random() < 0.3:  # the history as one text, as a stateless server sends it
        history = "".join(text for text, _ in document[:-1])
        document = [(history, user), document[-1]] if not document[-2][0] else [(history, GIVEN), document[-1]]
    return document


def pair_document(english: str, chinese: str, rng: random.Random, source_kind: int = GIVEN) -> list:
    """A translation prompt, either way; the source now and then without its full stop."""
    source, target, text, out = "English", "Chinese", english, chinese
    if rng.random() < 0.5:
        source, target, text, out = "Chinese", "English", chinese, english
    if rng.random() < 0.06 and text[-1] in ".。":
        text = text[:-1]
    return [(f"{source}: {text}\n\n{target}:", source_kind), (" " + out, WRITTEN)]


def fill_document(text: str, rng: random.Random, largest: int = 160) -> list:
    """Fill in the middle: the suffix first, then the prefix, then what belongs between them."""
    text = text[:1200]
    kind = rng.random()
    if kind < 0.4:  # whole lines
        cuts = [0] + [m.end() for m in re.finditer(r"\n", text)] + [len(text)]
    elif kind < 0.8:  # whole words
        cuts = [0] + [m.start() for m in re.finditer(r"(?<=\S)\s|(?<=[(\[:=])|(?=[)\]])|[，。]", text)] + [len(text)]
    else:
        cuts = list(range(len(text) + 1))
    cuts = sorted(set(cuts))
    start = rng.randrange(len(cuts) - 1) if len(cuts) > 1 else 0
    ends = [c for c in cuts[start + 1 :] if c - cuts[start] <= largest] or cuts[start + 1 : start + 2] or [len(text)]
    first, last = cuts[start], rng.choice(ends)
    suffix = text[last:] if rng.random() < 0.9 else text[last : last + rng.randint(1, 80)]
    return [(f"✿prefix✿✿suffix✿{suffix}✿middle✿{text[:first]}", GIVEN), (text[first:last] + "✿", WRITTEN)]


# ---------------------------------------------------------------------------------------------- own text


class Own:
    """Endless text from the generators of the data folder, without the held-out sentence pairs."""

    def __init__(self, data: str, seed: int, heldout: set):
        sys.path.insert(0, os.path.join(data, "tools"))
        import synth_chat
        import synth_enzh
        import synth_stories

        self.chat, self.grammar, self.tales = synth_chat, synth_enzh, synth_stories
        self.rng = random.Random(seed)
        make = getattr(synth_enzh.G, "unfiltered_pair", synth_enzh.G.pair)
        synth_enzh.G.unfiltered_pair = make

        def pair(grammar):
            while True:
                english, chinese = make(grammar)
                if english not in heldout:
                    return english, chinese

        synth_enzh.G.pair = pair
        self.pairs = synth_enzh.G(self.rng)
        self.talk = Talk(self.rng, synth_chat, synth_stories, self.pairs)
        self.fixed = [line.split("|") for line in synth_enzh.FIXED]

    def story(self) -> list:
        return [(self.tales.story(self.rng)[2], WRITTEN)]

    def pair(self) -> list:
        english, chinese = self.rng.choice(self.fixed) if self.rng.random() < 0.015 else self.pairs.pair()
        if self.rng.random() < 0.15:  # several sentences
            more = [self.pairs.pair() for _ in range(self.rng.randint(1, 3))]
            english, chinese = " ".join([english, *(e for e, _ in more)]), "".join([chinese, *(z for _, z in more)])
        return pair_document(english, chinese, self.rng)

    def chats(self, count: int) -> list:
        """Documents: half are the generator's conversations, half those of talk.py."""
        rng = self.rng
        records = self.chat.chats(rng.randrange(1 << 48), count // 2)
        out = [[m["content"] for m in record["messages"]] for record in records]
        out += [self.talk.conversation() for _ in range(count - len(out))]
        rng.shuffle(out)
        return [chat_document(messages, rng) for messages in out]

    def snippet(self) -> str:
        """A short program, with other names now and then."""
        rng = self.rng
        does, code, _ = rng.choice(self.chat.CODE)
        renames = [
            ("numbers", "values"),
            ("items", "things"),
            ("result", "answer"),
            ("x", "v"),
            ("n", "k"),
            ("s", "word"),
            ("a", "p"),
            ("b", "q"),
            ("i", "j"),
        ]
        for old, new in renames:
            if rng.random() < 0.15 and not re.search(rf"\b{new}\b", code):
                code = re.sub(rf"(?<![\"'\w.])\b{old}\b(?![\"'])", new, code)
        if "def " in code and rng.random() < 0.5:
            code = re.sub(r"(def [^\n]*:\n)", lambda m: f'{m.group(1)}    """{does[0].upper() + does[1:]}."""\n', code, count=1)
        elif rng.random() < 0.4:
            code = f"# This function {does}.\n{code}" if "def " in code else f"# This program {does}.\n{code}"
        return code + "\n"

    def fill(self) -> list:
        rng = self.rng
        kind = rng.random()
        if kind < 0.55:
            text = self.snippet()
            if rng.random() < 0.25:
                text += "\n\n" + self.snippet()
            return fill_document(text, rng, 120)
        if kind < 0.7:
            return [(self.snippet(), WRITTEN)]
        if kind < 0.9:
            text = self.tales.story(rng)[2]
            start = rng.choice([0, *[m.end() for m in re.finditer(r"[.!?]\"? ", text)][:-2]])
            return fill_document(text[start : start + rng.randint(80, 700)], rng)
        return fill_document(self.chat.zh_story(rng), rng, 60)


# ---------------------------------------------------------------------------------------------- read text


def read(data: str, name: str) -> str:
    return lzma.open(os.path.join(data, name + ".xz"), "rt", encoding="utf-8").read()


def is_held(text: str) -> bool:
    """One document of a hundred, by its text, is kept for measuring."""
    return zlib.crc32(text.encode()) % 100 == 0


def found(data: str, part: str, held: bool, heldout: set) -> list:
    """The collected (not generated) raw documents of a part."""
    if part in ("stories", "novels", "code"):
        texts = (t.strip("\n") for t in read(data, part + ".txt").split("<|endoftext|>\n"))
        return [t for t in texts if t and is_held(t) == held]
    if part == "tatoeba":
        rows = (line.split("\t") for line in read(data, "en-zh.tsv").splitlines())
        return [(e, z) for e, z, origin in rows if origin != "synth" and is_held(e) == held and e not in heldout]
    records = map(json.loads, read(data, "chat.jsonl").splitlines())
    chats = ([m["content"] for m in r["messages"]] for r in records if r["source"] != "synth")
    return [c for c in chats if is_held(c[0]) == held]


def found_document(part: str, raw, rng: random.Random) -> list:
    if part == "tatoeba":
        return pair_document(*raw, rng, READ)
    if part == "chat":
        return chat_document(raw, rng, READ)
    if part == "code" and rng.random() < 0.5:
        start = rng.choice([0] + [m.start() + 1 for m in re.finditer(r"\n(?=(def|class) )", raw)])
        return fill_document(raw[start:], rng)
    return [(raw, WRITTEN)]


def heldout_rows() -> list:
    """[English, Chinese] of the sentence pairs that training never sees."""
    with open(HELDOUT, encoding="utf-8") as file:
        return [line.split("\t") for line in file.read().splitlines()]


def keep_list(data: str) -> list:
    with open(os.path.join(data, "keep.txt")) as file:
        return [int(line) for line in file]


# ---------------------------------------------------------------------------------------------- shards


def write_shard(path: str, documents: list) -> None:
    """Store (ids, given) one after the other; a long document becomes windows of LONGEST + 1 ids that share an id."""
    windows = [(d, at) for d in documents for at in range(0, len(d[0]) - 1, LONGEST)]
    parts = [[x for d, at in windows for x in d[which][at : at + LONGEST + 1]] for which in (0, 1)]
    ends = np.cumsum([len(d[0][at : at + LONGEST + 1]) for d, at in windows])
    with open(path + ".part", "wb") as file:
        np.savez(file, ids=np.array(parts[0], np.uint16), given=np.array(parts[1], bool), ends=ends)
    os.replace(path + ".part", path)


def own_documents(own: Own, part: str, count: int) -> list:
    if part == "own-chat":
        return own.chats(count)
    make = {"own-stories": own.story, "own-pairs": own.pair, "own-fill": own.fill}[part]
    return [make() for _ in range(count)]


def make_shards(data: str, folder: str, parts: list, seed: int) -> None:
    """Write shard after shard of the parts in turn, at most four ahead of the trainer."""
    heldout = {english for english, _ in heldout_rows()}
    encoder, own, rng = Encoder(keep_list(data)), Own(data, seed, heldout), random.Random(seed)
    raw = {}
    number = 0
    size = {"own-stories": 6000, "own-chat": 10000, "own-pairs": 40000, "own-fill": 12000}
    parent = os.getppid()
    while os.getppid() == parent:
        idle = True
        for part in parts:
            if sum(name.startswith(part + "=") and name.endswith(".npz") for name in os.listdir(folder)) >= 4:
                continue
            if part in size:
                documents = own_documents(own, part, size[part] // 4 if number == 0 else size[part])
            else:
                if part not in raw:
                    raw[part] = found(data, part, False, heldout)
                chosen = rng.sample(raw[part], min(len(raw[part]), 5000))  # short shards: the first is ready early
                documents = [found_document(part, text, rng) for text in chosen]
            encoded = [encoder.document(d, rng) for d in documents]
            rng.shuffle(encoded)
            write_shard(os.path.join(folder, f"{part}={seed}-{number}.npz"), encoded)
            number += 1
            idle = False
        if idle:
            time.sleep(0.3)


def start_workers(data: str, folder: str, count: int, seed: int = 1000) -> list:
    total = sum(PARTS.values())
    slots = []
    for part, weight in PARTS.items():
        slots += [[part]] * int(weight * count / total)
    light = [p for p in PARTS if [p] not in slots]
    if light:
        slots.append(light)
    workers = [Process(target=make_shards, args=(data, folder, s, seed + n), daemon=True) for n, s in enumerate(slots)]
    for worker in workers:
        worker.start()
    return workers


def held_documents(data: str) -> dict:
    """Held-out documents of every part: found text never trained on, own text from other seeds."""
    heldout, rng = {english for english, _ in heldout_rows()}, random.Random(99)
    own = Own(data, 99, set())
    out = {}
    for part, count in (("own-stories", 250), ("own-chat", 500), ("own-fill", 400)):
        out[part] = own_documents(own, part, count)
    out["own-pairs"] = [pair_document(e, z, rng) for e, z in heldout_rows()]
    for part in ("stories", "novels", "tatoeba", "chat", "code"):
        out[part] = [found_document(part, raw, rng) for raw in found(data, part, True, heldout)]
    return out


def choose_kept(data: str) -> list:
    """Byte tokens, runs of spaces, marks, all that the generators use, then the most frequent of the rest."""
    from pyrwkv_tokenizer import RWKVTokenizer

    world, table, rng = RWKVTokenizer(), token_bytes(), random.Random(5)
    keep = {0, *MARKS} | {i for i, t in enumerate(table) if t and (len(t) == 1 or (len(t) <= 16 and set(t) == {32}))}

    def count(documents) -> Counter:
        total = Counter()
        for document in documents:
            for text, _ in document:
                total.update(world.encode(text))
        return total

    own = Own(data, 5, set())
    counted = Counter()
    for part, amount in (("own-chat", 40000), ("own-pairs", 60000), ("own-stories", 6000), ("own-fill", 8000)):
        counted += count(own_documents(own, part, amount))
    keep |= {i for i, n in counted.items() if n >= 3}
    print(len(keep), "ids for the generators")
    weighted = Counter()
    for part, weight in (("tatoeba", 12), ("chat", 2), ("code", 4), ("stories", 1), ("novels", 0.2)):
        for i, n in count(found_document(part, raw, rng) for raw in found(data, part, False, set())).items():
            weighted[i] += n * weight
    for i, _ in sorted(weighted.items(), key=lambda item: (-item[1], item[0])):
        if len(keep) >= KEPT:
            break
        keep.add(i)
    return sorted(keep)


def choose_heldout(data: str) -> list:
    own = Own(data, 77, {e for e, _ in (line.split("|") for line in Own(data, 0, set()).grammar.FIXED)})
    chosen = {}
    while len(chosen) < 200:
        english, chinese = own.pairs.pair()
        chosen[english] = chinese
    return list(chosen.items())


def write_lines(path: str, lines) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    command, data, target = sys.argv[1:4]
    if command == "keep":
        write_lines(target, map(str, choose_kept(data)))
    elif command == "heldout":
        write_lines(target, map("\t".join, choose_heldout(data)))
    elif command == "heldtext":
        encoder, rng = Encoder(keep_list(data)), random.Random(98)
        for part, documents in held_documents(data).items():
            write_shard(os.path.join(target, f"held-{part}.npz"), [encoder.document(d, rng) for d in documents])
    elif command == "shards":
        for worker in start_workers(data, target, int(sys.argv[4])):
            worker.join()
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
