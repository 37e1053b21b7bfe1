"""Train the demo model: a small RWKV-7 on packed documents, stopped by the clock.

    python demo/train.py DATA OUT --minutes 20 --workers 14

DATA is the folder that data.py describes, OUT receives model.rwkv and log.txt every few minutes. Needs a CUDA GPU and
nvcc (wkv.cu is compiled at the start); `--check` compares the kernels with a plain recurrence, `--device cpu` runs a few
slow steps. Weights and optimiser state are float32, the arithmetic is bfloat16. Tensors keep their published names from
the start; the embedding and the head have rows for the kept ids only, and the softmax runs over these.
"""

import argparse
import ctypes
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from demo import data as text
from rwkv_batch.model import packed_file

LAYERS, WIDTH, HEAD = 8, 256, 64
HEADS = WIDTH // HEAD
RANKS = {"w": 32, "a": 32, "v": 32, "g": 64}
DECAY = -math.exp(-0.5)
LOW = torch.bfloat16 if torch.cuda.is_available() else torch.float32
MIX = {  # share of the tokens of each part: at the start, and at the end
    "own-stories": (0.12, 0.12),
    "own-chat": (0.34, 0.44),
    "own-pairs": (0.12, 0.13),
    "own-fill": (0.06, 0.07),
    "stories": (0.17, 0.11),
    "novels": (0.125, 0.06),
    "tatoeba": (0.02, 0.025),
    "chat": (0.03, 0.03),
    "code": (0.015, 0.015),
}
PROMPTS = [
    "User: Hello!\n\nAssistant:",
    "User: What is the capital of France?\n\nAssistant: <think>\n</think>\n",
    "User: 你好！\n\nAssistant: <think>\n</think>",
    "User: What is 7 + 5?\n\nAssistant:",
    "User: My name is Anna and I like cats.\n\nAssistant: Hello, Anna!\n\nUser: What is my name?\n\nAssistant:",
    "User: 讲一个故事。\n\nAssistant:",
    "English: The weather is very nice today, so we want to go to the park.\n\nChinese:",
    "Chinese: 我的朋友昨天买了一本有趣的书。\n\nEnglish:",
    "✿prefix✿✿suffix✿\n    return result\n✿middle✿def total(numbers):\n    result = 0\n",
    "User: Tell me a story about a fox.\n\nAssistant: <think",
    "User: Who is the president of France?\n\nAssistant:",
    "User: 我叫小红，我喜欢猫。\n\nAssistant: 你好，小红！\n\nUser: 我叫什么名字？\n\nAssistant: <think>\n</think>\n",
    "✿prefix✿✿suffix✿\n✿middle✿def is_even(n):\n    return",
    "Once upon a time, there was a little",
]


# ---------------------------------------------------------------------------------------------- recurrence


def recurrence(r, decay, k, v, a, b, starts):
    """The exact recurrence, token by token. All [tokens, heads, 64]; a document begins at every number in starts."""
    fresh = set(starts.tolist())
    r, decay, k, v, a, b = (x.float().unbind(0) for x in (r, decay, k, v, a, b))
    state, out = None, []
    for t in range(len(r)):
        if t in fresh:
            state = torch.zeros_like(r[t])[:, None, :].repeat(1, HEAD, 1)
        removed = (state @ a[t][:, :, None]) * b[t][:, None, :]
        state = state * decay[t].exp()[:, None, :] + removed + v[t][:, :, None] * k[t][:, None, :]
        out.append((state @ r[t][:, :, None])[:, :, 0])
    return torch.stack(out)


LIBRARY = []


def library() -> ctypes.CDLL:
    if not LIBRARY:
        source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "wkv.cu")
        built = "/tmp/demo-wkv.so"
        flags = ["-O3", "-arch=native", "--shared", "-Xcompiler", "-fPIC"]
        subprocess.run(["nvcc", *flags, "-o", built, source], check=True)
        LIBRARY.append(ctypes.CDLL(built))
    return LIBRARY[0]


def launch(name: str, documents: int, heads: int, tensors: list) -> None:
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if code := getattr(library(), name)(documents, heads, *pointers, stream):
        raise RuntimeError(f"{name}: CUDA error {code}")


Tensors2 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Tensors6 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("demo::wkv", mutates_args=())
def wkv(
    r: torch.Tensor, decay: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
    starts: torch.Tensor, slots: torch.Tensor, order: torch.Tensor,
) -> Tensors2:  # fmt: skip
    """y [tokens, heads, 64], stored states, and S a of every token."""
    y, states, sums = new_outputs(r, order)
    launch("wkv_forward", len(order), r.shape[1], [starts, slots, order, r, decay, k, v, a, b, y, states, sums])
    return y, states, sums


def new_outputs(r, order):
    count = r.shape[0] // 16 + order.shape[0]
    states = r.new_empty(count, r.shape[1], HEAD, HEAD, dtype=torch.float32)
    return torch.empty_like(r), states, torch.empty_like(r, dtype=torch.float32)


@wkv.register_fake
def _(r, decay, k, v, a, b, starts, slots, order):
    return new_outputs(r, order)


@torch.library.custom_op("demo::wkv_backward", mutates_args=())
def wkv_backward(
    r: torch.Tensor, decay: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
    starts: torch.Tensor, slots: torch.Tensor, order: torch.Tensor,
    dy: torch.Tensor, states: torch.Tensor, sums: torch.Tensor,
) -> Tensors6:  # fmt: skip
    grads = tuple(torch.empty_like(r) for _ in range(6))
    inputs = [starts, slots, order, r, decay, k, v, a, b, dy.contiguous(), states, sums]
    launch("wkv_backward", len(order), r.shape[1], [*inputs, *grads])
    return grads


@wkv_backward.register_fake
def _(r, decay, k, v, a, b, starts, slots, order, dy, states, sums):
    return tuple(torch.empty_like(r) for _ in range(6))


def keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1], output[2])


def backward(ctx, dy, dstates, dsums):
    *inputs, states, sums = ctx.saved_tensors
    return (*torch.ops.demo.wkv_backward(*inputs, dy, states, sums), None, None, None)


wkv.register_autograd(backward, setup_context=keep_for_backward)


# ---------------------------------------------------------------------------------------------- model


def new_weights(device: str, seed: int = 1) -> dict:
    """Fresh float32 weights under their published names, started as RWKV-7 models usually are."""
    torch.manual_seed(seed)
    w = {}
    channel = torch.arange(WIDTH)
    part = channel / WIDTH
    linear = channel / (WIDTH - 1) - 0.5
    zigzag = (channel % HEAD - (HEAD - 1) / 2) / ((HEAD - 1) / 2)
    zigzag = zigzag * zigzag.abs()

    def spread(*shape, scale):
        return (torch.rand(*shape) * 2 - 1) * scale

    def orthogonal(*shape, gain):
        return torch.nn.init.orthogonal_(torch.empty(*shape), gain=gain)

    w["emb.weight"] = spread(text.KEPT, WIDTH, scale=1e-4)
    for i in range(LAYERS):
        p = f"blocks.{i}."
        deep, rest = i / (LAYERS - 1), 1 - i / LAYERS
        for name in ("ln0", "ln1", "ln2") if i == 0 else ("ln1", "ln2"):
            w[f"{p}{name}.weight"], w[f"{p}{name}.bias"] = torch.ones(WIDTH), torch.zeros(WIDTH)
        a = p + "att."
        for name, power in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
            w[a + "x_" + name] = (1 - part ** (power * rest)).view(1, 1, -1)
        speed = -6 + 6 * (channel / (WIDTH - 1)) ** (1 + deep**0.3)
        w[a + "w0"] = (speed + 0.5 + zigzag * 2.5).view(1, 1, -1)
        w[a + "a0"] = (-0.19 + zigzag * 0.3 + linear * 0.4).view(1, 1, -1)
        if i:
            w[a + "v0"] = (0.73 - linear * 0.4).view(1, 1, -1)
        for name, rank in RANKS.items():
            if i or name != "v":
                w[f"{a}{name}1"], w[f"{a}{name}2"] = torch.zeros(WIDTH, rank), orthogonal(rank, WIDTH, gain=0.1)
        w[a + "k_k"] = (0.71 - linear * 0.1).view(1, 1, -1)
        w[a + "k_a"] = torch.full((1, 1, WIDTH), 1.02)
        w[a + "r_k"] = torch.full((HEADS, HEAD), -0.04)
        for name, scale in (("receptance", 0.5), ("key", 0.05), ("value", 0.5), ("output", 0)):
            w[f"{a}{name}.weight"] = spread(WIDTH, WIDTH, scale=scale / WIDTH**0.5)
        w[a + "ln_x.weight"] = torch.full((WIDTH,), ((1 + i) / LAYERS) ** 0.7)
        w[a + "ln_x.bias"] = torch.zeros(WIDTH)
        w[p + "ffn.x_k"] = (1 - part ** (rest**4)).view(1, 1, -1)
        w[p + "ffn.key.weight"] = spread(4 * WIDTH, WIDTH, scale=0.5 / WIDTH**0.5)
        w[p + "ffn.value.weight"] = torch.zeros(WIDTH, 4 * WIDTH)
    w["ln_out.weight"], w["ln_out.bias"] = torch.ones(WIDTH), torch.zeros(WIDTH)
    w["head.weight"] = orthogonal(text.KEPT, WIDTH, gain=0.5 * (text.KEPT / WIDTH) ** 0.5)
    return {name: tensor.float().to(device).requires_grad_() for name, tensor in w.items()}


def packed_weights(path: str, device: str) -> dict:
    """The weights of a packed file, with the kept rows only."""
    weights, keep = packed_file.unpack(path), packed_file.kept_ids(path)
    for name in ("emb.weight", "head.weight"):
        weights[name] = weights[name][keep]
    return {name: tensor.to(device).requires_grad_() for name, tensor in weights.items()}


def layer_of(weights: dict, i: int) -> dict:
    prefix = f"blocks.{i}."
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def before(x, inside):
    """The previous token of the same document, zero at its start. x [tokens, width], inside [tokens, 1]."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]]) * inside


def block(x, first_value, z, inside, starts, slots, order):
    """One layer on packed documents. x [tokens, width] float32; returns the new x and the first layer's values."""

    def low(name):
        return z[name].to(LOW).flatten() if z[name].dim() == 3 else z[name].to(LOW)

    heads = (x.shape[0], HEADS, HEAD)
    if "ln0.weight" in z:
        x = F.layer_norm(x, (WIDTH,), z["ln0.weight"], z["ln0.bias"])
    n = F.layer_norm(x, (WIDTH,), z["ln1.weight"], z["ln1.bias"]).to(LOW)
    delta = before(n, inside) - n
    mixed = {name: n + delta * low("att.x_" + name) for name in "rwkvag"}
    r = F.linear(mixed["r"], low("att.receptance.weight"))
    k = F.linear(mixed["k"], low("att.key.weight"))
    v = F.linear(mixed["v"], low("att.value.weight"))
    w = torch.tanh(mixed["w"] @ low("att.w1")) @ low("att.w2")
    decay = (DECAY * torch.sigmoid(z["att.w0"].flatten() + w.float())).to(LOW)
    rate = torch.sigmoid(z["att.a0"].flatten() + (mixed["a"] @ low("att.a1")) @ low("att.a2"))
    gate = torch.sigmoid(mixed["g"] @ low("att.g1")) @ low("att.g2")
    if first_value is None:
        first_value = v
    else:
        share = torch.sigmoid(z["att.v0"].flatten() + (mixed["v"] @ low("att.v1")) @ low("att.v2"))
        v = (v + (first_value - v) * share).to(LOW)
    kk = F.normalize((k * z["att.k_k"].flatten()).view(heads), dim=-1)
    k = (k * (1 + (rate - 1) * z["att.k_a"].flatten())).to(LOW)
    args = [y.to(LOW).contiguous().view(heads) for y in (r, decay, k, v, -kk, kk * rate.view(heads))]
    y = torch.ops.demo.wkv(*args, starts, slots, order)[0] if x.is_cuda else recurrence(*args, starts)
    y = F.layer_norm(y.float(), (HEAD,), eps=64e-5).view(-1, WIDTH) * z["att.ln_x.weight"] + z["att.ln_x.bias"]
    own = (r.view(heads).float() * k.view(heads) * z["att.r_k"]).sum(-1, keepdim=True) * v.view(heads)
    y = (y + own.view(-1, WIDTH)) * gate
    x = x + F.linear(y.to(LOW), low("att.output.weight"))
    n = F.layer_norm(x, (WIDTH,), z["ln2.weight"], z["ln2.bias"]).to(LOW)
    n = n + (before(n, inside) - n) * low("ffn.x_k")
    x = x + F.linear(torch.relu(F.linear(n, low("ffn.key.weight"))).square(), low("ffn.value.weight"))
    return x, first_value


def loss_of(x, targets, weight, bias, head):
    """Mean loss over the targets that are not -100."""
    logits = F.linear(F.layer_norm(x, (WIDTH,), weight, bias).to(LOW), head.to(LOW))
    return F.cross_entropy(logits.float(), targets, ignore_index=-100)


class Model:
    """Weights, and the compiled pieces that run on them."""

    def __init__(self, weights: dict, pieces: list, device: str):
        self.weights, self.device = weights, device
        self.block = torch.compile(block, dynamic=False) if device == "cuda" else block
        self.loss_of = torch.compile(loss_of, dynamic=False) if device == "cuda" else loss_of
        flat = torch.tensor([row for p in pieces for row in p], device=device)
        counts = torch.tensor([len(p) for p in pieces], device=device)
        self.pieces, self.offsets = flat, counts.cumsum(0) - counts

    def embeddings(self, weights: dict):
        """[65536, width] by compact id: the kept rows, then the means of the rows that spell each other id."""
        rows = weights["emb.weight"]
        return torch.cat([rows, F.embedding_bag(self.pieces, rows, self.offsets, mode="mean")])

    def loss(self, batch: dict, weights: dict | None = None):
        weights = weights or self.weights
        x = F.embedding(batch["ids"], self.embeddings(weights))
        inside = torch.ones(len(x) + 1, 1, device=x.device, dtype=LOW)  # empty documents start behind the end
        inside[batch["starts"].long()] = 0
        inside = inside[:-1]
        first = None
        for i in range(LAYERS):
            x, first = self.block(x, first, layer_of(weights, i), inside, batch["starts"], batch["slots"], batch["order"])
        return self.loss_of(x, batch["targets"], weights["ln_out.weight"], weights["ln_out.bias"], weights["head.weight"])

    @torch.no_grad()
    def generate(self, prompts: list, count: int, weights: dict | None = None) -> list:
        """Greedy continuations of lists of compact ids, all rows at once, in float32; a row ends at id 0."""
        weights = weights or self.weights
        table, layers = self.embeddings(weights), [layer_of(weights, i) for i in range(LAYERS)]
        rows = len(prompts)
        last = torch.zeros(LAYERS, 2, rows, WIDTH, device=self.device)
        state = torch.zeros(LAYERS, rows, HEADS, HEAD, HEAD, device=self.device)
        longest = max(map(len, prompts))
        given = torch.full((rows, longest), -1, device=self.device)
        for n, prompt in enumerate(prompts):
            given[n, : len(prompt)] = torch.tensor(prompt, device=self.device)
        out, ids = [], given[:, 0]
        for t in range(longest + count):
            out.append(ids)
            x, first = table[ids], None
            for i, z in enumerate(layers):
                x, first = self.step(x, first, z, last[i], state[i])
            x = F.layer_norm(x, (WIDTH,), weights["ln_out.weight"], weights["ln_out.bias"])
            ids = (x @ weights["head.weight"].T).argmax(-1)
            if t + 1 < longest:
                ids = torch.where(given[:, t + 1] >= 0, given[:, t + 1], ids)
        results = []
        for n, row in enumerate(torch.stack(out, 1).tolist()):
            row = row[len(prompts[n]) : len(prompts[n]) + count]
            results.append(row[: row.index(0)] if 0 in row else row)
        return results

    @staticmethod
    def step(x, first_value, z, last, state):
        """One token of every row; last [2, rows, width] and state [rows, heads, 64, 64] are changed in place."""
        heads = (len(x), HEADS, HEAD)
        if "ln0.weight" in z:
            x = F.layer_norm(x, (WIDTH,), z["ln0.weight"], z["ln0.bias"])
        n = F.layer_norm(x, (WIDTH,), z["ln1.weight"], z["ln1.bias"])
        delta = last[0] - n
        last[0] = n
        mixed = {name: n + delta * z["att.x_" + name].flatten() for name in "rwkvag"}
        r, k, v = (mixed[c] @ z[f"att.{name}.weight"].T for c, name in (("r", "receptance"), ("k", "key"), ("v", "value")))
        w = torch.exp(DECAY * torch.sigmoid(z["att.w0"].flatten() + torch.tanh(mixed["w"] @ z["att.w1"]) @ z["att.w2"]))
        rate = torch.sigmoid(z["att.a0"].flatten() + mixed["a"] @ z["att.a1"] @ z["att.a2"])
        gate = torch.sigmoid(mixed["g"] @ z["att.g1"]) @ z["att.g2"]
        if first_value is None:
            first_value = v
        else:
            v = v + (first_value - v) * torch.sigmoid(z["att.v0"].flatten() + mixed["v"] @ z["att.v1"] @ z["att.v2"])
        kk = F.normalize((k * z["att.k_k"].flatten()).view(heads), dim=-1)
        k = (k * (1 + (rate - 1) * z["att.k_a"].flatten())).view(heads)
        r, v = r.view(heads), v.view(heads)
        removed = torch.einsum("bhij,bhj->bhi", state, kk)
        state.mul_(w.view(heads)[:, :, None, :]).sub_(removed[..., None] * (kk * rate.view(heads))[:, :, None, :])
        state.add_(v[..., None] * k[:, :, None, :])
        y = F.layer_norm(torch.einsum("bhij,bhj->bhi", state, r), (HEAD,), eps=64e-5).reshape(len(x), WIDTH)
        y = y * z["att.ln_x.weight"] + z["att.ln_x.bias"]
        y = y + ((r * k * z["att.r_k"]).sum(-1, keepdim=True) * v).view(len(x), WIDTH)
        x = x + (y * gate) @ z["att.output.weight"].T
        n = F.layer_norm(x, (WIDTH,), z["ln2.weight"], z["ln2.bias"])
        m = n + (last[1] - n) * z["ffn.x_k"].flatten()
        last[1] = n
        return x + torch.relu(m @ z["ffn.key.weight"].T).square() @ z["ffn.value.weight"].T, first_value


# ---------------------------------------------------------------------------------------------- batches


def batch_of(ids: np.ndarray, given: np.ndarray, lengths: np.ndarray, tokens: int, device: str) -> dict:
    """Pack documents (ids, flags and lengths one after the other) into exactly `tokens` inputs, padded or cut."""
    ends = lengths.cumsum()
    is_last, is_first = np.zeros(len(ids), bool), np.zeros(len(ids), bool)
    is_last[ends - 1], is_first[ends - lengths] = True, True
    inputs, targets = ids[~is_last][:tokens].astype(np.int64), ids[~is_first][:tokens].astype(np.int64)
    targets[(targets >= text.KEPT) | given[~is_first][:tokens]] = -100
    bounds = np.concatenate([[0], (lengths - 1).cumsum()])
    bounds = np.minimum(bounds, len(inputs))
    missing = tokens - len(inputs)
    most = tokens // 12
    inputs, targets = np.pad(inputs, (0, missing)), np.pad(targets, (0, missing), constant_values=-100)
    padding = np.arange(bounds[-1], tokens, text.LONGEST)  # padding is documents too
    bounds = np.concatenate([bounds, padding[1:], [tokens]]) if missing else bounds
    size = np.diff(bounds)
    if len(size) > most:
        raise ValueError(f"{len(size)} documents in a batch, {most} fit")
    slots = np.concatenate([[0], (-(-size // 16)).cumsum()[:-1]])
    fill = most - len(size)
    arrays = {
        "ids": inputs,
        "targets": targets,
        "starts": np.concatenate([bounds, np.full(fill, tokens)]).astype(np.int32),
        "slots": np.pad(slots, (0, fill)).astype(np.int32),
        "order": np.argsort(-np.pad(size, (0, fill)), kind="stable").astype(np.int32),
    }
    out = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {name: x.pin_memory().to(device, non_blocking=True) for name, x in out.items()} if device == "cuda" else out


class Loader:
    """Mixes the shards of the parts into batches, in a thread of its own."""

    def __init__(self, folder: str, tokens: int, device: str, progress):
        self.folder, self.tokens, self.device, self.progress = folder, tokens, device, progress
        self.shards, self.debt, self.used, self.waited = {}, dict.fromkeys(MIX, 0.0), dict.fromkeys(MIX, 0), 0.0
        self.ready = queue.Queue(3)
        threading.Thread(target=self.work, daemon=True).start()

    def next_shard(self, part: str) -> None:
        while True:
            for name in sorted(os.listdir(self.folder)):
                if name.startswith(part + "=") and name.endswith(".npz"):
                    path = os.path.join(self.folder, name)
                    shard = np.load(path)
                    self.shards[part] = [shard["ids"], shard["given"], shard["ends"], 0]
                    os.remove(path)
                    return
            time.sleep(0.05)
            self.waited += 0.05

    def take(self, part: str, tokens: float) -> tuple:
        """(ids, given, lengths) of the next documents of a part, at most `tokens` inputs but at least one document."""
        if part not in self.shards or self.shards[part][3] >= len(self.shards[part][2]):
            self.next_shard(part)
        ids, given, ends, at = self.shards[part]
        begin = ends[at - 1] if at else 0
        inputs = ends[at:] - begin - np.arange(1, len(ends) - at + 1)
        to = at + max(1, int(np.searchsorted(inputs, tokens, side="right")))
        self.shards[part][3] = to
        self.used[part] += int(inputs[to - at - 1])
        return ids[begin : ends[to - 1]], given[begin : ends[to - 1]], np.diff(ends[at:to], prepend=begin)

    def work(self) -> None:
        while True:
            done = self.progress()
            found, total = [], 0
            for part, (start, end) in MIX.items():
                late = min(1.0, max(0.0, (done - 0.7) / 0.2))
                self.debt[part] += (start + (end - start) * late) * self.tokens
                while self.debt[part] > 400 and total < self.tokens:
                    found.append(self.take(part, self.debt[part]))
                    count = len(found[-1][0]) - len(found[-1][2])
                    self.debt[part] -= count
                    total += count
            while total < self.tokens:
                found.append(self.take("own-chat", self.tokens - total))
                total += len(found[-1][0]) - len(found[-1][2])
            ids, given, lengths = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
            self.ready.put(batch_of(ids, given, lengths, self.tokens, self.device))


# ---------------------------------------------------------------------------------------------- training


class Run:
    def __init__(self, args):
        self.args = args
        self.began = time.time()
        keep = text.keep_list(args.data)
        self.encoder = text.Encoder(keep)
        self.pieces = [self.encoder.pieces[text.KEPT + n] for n in range(65536 - text.KEPT)]
        self.names, self.bytes = self.encoder.keep + self.encoder.rest, text.token_bytes()
        weights = packed_weights(args.start, args.device) if args.start else new_weights(args.device)
        self.model = Model(weights, self.pieces, args.device)
        self.step = 0

    def log(self, line: str) -> None:
        line = f"{time.time() - self.began:7.1f} {line}"
        print(line, flush=True)
        with open(os.path.join(self.args.out, "log.txt"), "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def progress(self) -> float:
        """The share of the training time that is over."""
        return min(1.0, (time.time() - self.began) / (60 * self.args.minutes))

    def words(self, ids: list) -> str:
        return b"".join(self.bytes[self.names[i]] for i in ids).decode("utf-8", "replace")

    def held(self) -> dict:
        """Held-out batches by part, at most one batch each."""
        out = {}
        for part in MIX:
            shard = np.load(os.path.join(self.args.data, f"held-{part}.npz"))
            fits = max(1, int(np.searchsorted(shard["ends"], self.args.tokens)))
            fits = min(fits, self.args.tokens // 12 - self.args.tokens // text.LONGEST - 2)
            lengths = np.diff(shard["ends"][:fits], prepend=0)
            end = shard["ends"][fits - 1]
            out[part] = batch_of(shard["ids"][:end], shard["given"][:end], lengths, self.args.tokens, self.args.device)
        return out

    @torch.no_grad()
    def losses(self, batches: dict, weights: dict | None = None) -> dict:
        return {part: round(float(self.model.loss(batch, weights)), 4) for part, batch in batches.items()}

    def samples(self, weights: dict) -> None:
        prompts = [self.encoder.text(p, spelled=False) for p in PROMPTS]
        for prompt, ids in zip(PROMPTS, self.model.generate(prompts, 100, weights), strict=True):
            self.log("  " + json.dumps([prompt[-60:], self.words(ids)], ensure_ascii=False))

    def translated(self, weights: dict) -> str:
        """How many of the held-out sentences come back exactly, each way."""
        rows, out = text.heldout_rows(), []
        for prompt, column in (("English: {0}\n\nChinese:", 1), ("Chinese: {1}\n\nEnglish:", 0)):
            prompts = [self.encoder.text(prompt.format(*row), spelled=False) for row in rows]
            answers = [self.words(ids).strip() for ids in self.model.generate(prompts, 48, weights)]
            out.append(sum(a == row[column] for a, row in zip(answers, rows, strict=True)))
            if wrong := [(row[column], a) for a, row in zip(answers, rows, strict=True) if a != row[column]][:4]:
                self.log("  wrong: " + json.dumps(wrong, ensure_ascii=False))
        return f"{out[0]} and {out[1]} of {len(rows)}"

    def report(self, batches: dict) -> None:
        """Losses, samples and a packed file of the present weights."""
        weights = packed_file.rounded(self.model.weights)
        for name, chosen in (("bf16", None), ("int8", weights)):
            self.log(f"held-out loss {name}: {json.dumps(self.losses(batches, chosen))}")
        self.log(f"exact translations: {self.translated(weights)}")
        self.samples(weights)
        path = os.path.join(self.args.out, "model.rwkv")
        size = packed_file.pack(self.model.weights, self.encoder.keep, self.pieces, path + ".part")
        os.replace(path + ".part", path)
        self.log(f"packed {size:,} bytes at step {self.step}")

    def optimiser(self):
        groups = {"matrix": [], "fast": [], "plain": []}
        for name, tensor in self.model.weights.items():
            is_matrix = name.endswith(".weight") and tensor.dim() == 2 and name != "emb.weight"
            groups["matrix" if is_matrix else "fast" if name.endswith("att.w0") else "plain"].append(tensor)
        settings = [
            {"params": groups["matrix"], "weight_decay": 0.1, "times": 1},
            {"params": groups["fast"], "weight_decay": 0.0, "times": 2},
            {"params": groups["plain"], "weight_decay": 0.0, "times": 1},
        ]
        return torch.optim.AdamW(settings, lr=self.args.lr, betas=(0.9, 0.99), eps=1e-15, fused=self.args.device == "cuda")

    def train(self) -> None:
        args = self.args
        optimiser, loader = self.optimiser(), Loader(args.shards, args.tokens, args.device, self.progress)
        batches = self.held() if args.device == "cuda" else {}
        batch = loader.ready.get()
        self.model.loss(batch).backward()  # compiles
        optimiser.zero_grad()
        self.log("compiled")
        self.began = time.time()
        next_report, seen, total = args.report * 60, 0, torch.zeros((), device=args.device)
        mark = time.time()
        while (done := self.progress()) < 1:
            batch = loader.ready.get()
            loss = self.model.loss(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(list(self.model.weights.values()), 1.0)
            rate = args.lr * min(1.0, (self.step + 1) / args.warmup) * max(1 - done, 0.005)
            for group in optimiser.param_groups:
                group["lr"] = rate * group["times"]
            optimiser.step()
            optimiser.zero_grad()
            self.step += 1
            seen += 1
            total += loss.detach()
            if self.step % args.every == 0:
                speed = seen * args.tokens / (time.time() - mark)
                line = f"step {self.step} {done:.3f} loss {float(total) / seen:.4f} rate {rate:.2e}"
                self.log(f"{line} {speed:,.0f} tokens/s wait {loader.waited:.1f}")
                seen, mark = 0, time.time()
                total.zero_()
            if batches and time.time() - self.began > next_report:
                next_report += args.report * 60
                self.report(batches)
                mark, seen = time.time(), 0
                total.zero_()
        self.log(f"trained {self.step} steps, {self.step * args.tokens:,} tokens: {json.dumps(loader.used)}")
        if batches:
            self.report(batches)
        self.log("finished")


def check(device: str) -> None:
    """Compare the kernels with the plain recurrence, values and gradients, on a few documents."""
    torch.manual_seed(0)
    lengths = np.array([1, 15, 16, 17, 40, 3, 70, 33, 5])
    tokens = int(lengths.sum())
    shape = (tokens, HEADS, HEAD)
    kk = F.normalize(torch.randn(shape), dim=-1)
    r, k, v = torch.randn(shape), torch.randn(shape), torch.randn(shape)
    decay = DECAY * torch.sigmoid(torch.randn(shape) * 3)
    inputs = [x.to(device, LOW).requires_grad_() for x in (r, decay, k, v, -kk, kk * torch.rand(shape))]
    bounds = np.concatenate([[0], lengths.cumsum()])
    starts = torch.tensor(bounds, dtype=torch.int32, device=device)
    slots = torch.tensor(np.concatenate([[0], (-(-lengths // 16)).cumsum()[:-1]]), dtype=torch.int32, device=device)
    order = torch.arange(len(lengths), dtype=torch.int32, device=device)
    weight = torch.randn(shape, device=device).to(LOW)
    exact = recurrence(*inputs, starts)
    wanted = torch.autograd.grad((exact * weight).sum(), inputs)
    got = torch.ops.demo.wkv(*inputs, starts, slots, order)[0]
    grads = torch.autograd.grad((got.float() * weight).sum(), inputs)
    for name, x, y in zip(("y", "r", "decay", "k", "v", "a", "b"), (exact, *wanted), (got, *grads), strict=True):
        error = float((x.float() - y.float()).detach().norm() / x.detach().float().norm())
        print(f"{name}: relative error {error:.1e}", flush=True)
        if not error < 2e-2:
            sys.exit("the kernels are wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("out")
    parser.add_argument("--shards", default="/dev/shm/demo-shards")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--report", type=float, default=4, help="minutes between reports")
    parser.add_argument("--tokens", type=int, default=65536, help="of one batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--workers", type=int, default=0, help="processes that make text; 0 when others fill --shards")
    parser.add_argument("--start", default="", help="a packed model to go on from")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        return check(args.device)
    torch.set_float32_matmul_precision("high")
    os.makedirs(args.out, exist_ok=True)
    os.makedirs(args.shards, exist_ok=True)
    if args.workers:
        text.start_workers(args.data, args.shards, args.workers, seed=int(time.time()))
    Run(args).train()


if __name__ == "__main__":
    main()
