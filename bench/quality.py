#!/usr/bin/env python3
"""What quantising costs: held-out loss, divergence and agreement of a quantised model against the same model as it is.

    python bench/quality.py --text FILE [--text FILE ...] [--model-path M.pth] [--modes int8,fp8,...] [--tokens 20000]
    python bench/quality.py --model-path M.pth --lambada lambada_test.jsonl --modes int8,int4

--text    plain text whose documents are parted by lines `<|endoftext|>`, or a held-out shard of `demo/data.py heldtext`
--modes   formats of `--quant`; `fp8` rounds the weights only, as steps of few rows do, `fp8-w8a8` the inputs of products too,
          as steps of many rows do on cards with fp8 products
--ops     on a GPU: kernels, or the plain ops in fp32; on a CPU always these

loss: nats a token, of the tokens that have a logit; beside it the change in percent with its standard error, over documents.
KL: from the model as it is to the quantised one, nats. Top-1: how often both find the same token most likely. The model as it
is runs in fp32 with plain ops, in fp16 with kernels. LAMBADA: how often the last word is what the model would write.

--off-grid  moves the weights of a model that was made from bytes, as the demo model is, off the grid of these bytes by noise as
            large as its steps: as they are, int8 would find the same bytes again and cost nothing
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from bench.cpu import cpu_name
from rwkv_batch import __version__
from rwkv_batch.checks.lambada import read_passages
from rwkv_batch.config import DEMO_FOLDER
from rwkv_batch.engine.build import tune_cpu, usable_cpus, valid_ids
from rwkv_batch.kernels import compiler
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.ops import KernelOps
from rwkv_batch.kernels.variants import PRODUCTS, Method
from rwkv_batch.model import checkpoint
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.architectures import BaseLayer, model_class
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.quantized import FORMATS, PLAIN, Quantisation
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.model.weight import Weight
from rwkv_batch.model.weights import Weights
from rwkv_batch.text.tokenizer import Tokenizer, for_vocab

W8A8 = "fp8-w8a8"
STEP = 512  # tokens of a step, all of whose logits are looked at
SLOTS = 32  # documents of a step, at most
END_OF_TEXT = "<|endoftext|>"
SHARD = ".npz"
FP8 = (Method.FP8, Method.FP8_CUBLAS)


@dataclass(frozen=True)
class Document:
    """Token ids; `counts` says which of them are predictions to be judged (the first never is)."""

    ids: list[int]
    counts: list[bool]


class Runner:
    """One model, fed whole documents, each from an empty state."""

    def __init__(self, weights: Weights, library: object, mode: str):
        self.weights = weights
        self.mode = mode
        if library is None:
            self.model, dtypes = model_class(weights.architecture)(weights), {}
        else:
            self.ops = KernelOps(weights, Launcher(library, weights.device), max_tokens=STEP, max_rows=STEP)
            self.model = Model(weights, self.ops, "kernels")
            dtypes = {"shift_dtype": torch.float16, "wkv_dtype": torch.float16}
        self.kernels = library is not None
        self.state = State(weights.shape, SLOTS, device=weights.device, **dtypes)

    def log_probs(self, documents: list[list[int]]) -> torch.Tensor:
        """Return what the model expects behind each of at most STEP tokens of SLOTS documents [N, U], fp32."""
        slots, device = list(range(len(documents))), self.weights.device
        self.state.clear(slots)
        tokens = torch.tensor([token for ids in documents for token in ids], device=device)
        if self.kernels and self.mode.startswith("fp8"):
            self._choose(len(tokens))
        rows = PackedRows(slots, [len(ids) for ids in documents], device)
        logits = self.model.forward(tokens, rows, self.state, logits_of=torch.arange(len(tokens), device=device))
        return logits.float().log_softmax(1)

    def _choose(self, num_tokens: int) -> None:
        """Have the products of a step round their inputs, or not."""
        for name in PRODUCTS:
            offer = self.ops.variants(name, num_tokens, self.ops.prepared.layers[0])
            fitting = [variant for variant in offer if (variant.method in FP8) == (self.mode == W8A8)]
            self.ops.choose(name, num_tokens, (fitting or offer)[0])


class Sums:
    """What one mode adds up to, document by document."""

    def __init__(self) -> None:
        self.documents: list[list[float]] = []  # tokens, loss as it is, loss, divergence, agreement

    def add(self, plain: torch.Tensor, ours: torch.Tensor, batch: list[Document], columns: torch.Tensor) -> None:
        """Count a step. `plain`, `ours`: log probabilities [N, U]; `columns`: of each id."""
        divergence = (plain.exp() * (plain - ours)).sum(1)
        agrees = (plain.argmax(1) == ours.argmax(1)).float()
        start = 0
        for document in batch:
            column = columns[torch.tensor(document.ids[1:], device=columns.device)]
            judged = (column >= 0) & torch.tensor(document.counts[1:], device=columns.device)
            at, column = start + judged.nonzero().view(-1), column[judged]
            start += len(document.ids)
            each = (-plain[at, column], -ours[at, column], divergence[at], agrees[at])
            self.documents.append([len(at), *(values.double().sum().item() for values in each)])

    def figures(self) -> dict[str, float]:
        """Return means over tokens."""
        table = np.array(self.documents)
        tokens, *sums = table.sum(0).tolist()
        plain, ours, divergence, agreement = (value / tokens for value in sums)
        spread = math.sqrt(((table[:, 2] - table[:, 1] - table[:, 0] * (ours - plain)) ** 2).sum()) / tokens
        return {
            "tokens": int(tokens), "loss_plain": plain, "loss": ours, "change_percent": 100 * (ours - plain) / plain,
            "change_error_percent": 100 * spread / plain, "kl": divergence, "top1_percent": 100 * agreement,
        }  # fmt: skip


class Bench:
    """A checkpoint, the model as it is, and documents."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = torch.device(args.device)
        on_gpu = self.device.type == "cuda"
        self.library = compiler.library(self.device.index or 0) if on_gpu and args.ops == "kernels" else None
        self.dtype = torch.float32 if self.library is None else torch.float16
        self.file = checkpoint.find_checkpoint(args.model_path or DEMO_FOLDER / "model.rwkv")
        shape = weights_module.check_tensors(self._tensors(), str(self.file))
        reads = args.lambada or any(not path.endswith(SHARD) for path in args.text)
        self.tokenizer = for_vocab(shape.vocab_size) if reads else None
        self.plain = Runner(self.load(PLAIN), self.library, "none")
        self.columns = torch.full((shape.vocab_size,), -1, device=self.device)
        outputs = self.plain.weights.output_ids
        self.columns[outputs] = torch.arange(len(outputs), device=self.device)

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = checkpoint.read_file(self.file)
        return off_grid(tensors) if self.args.off_grid else tensors

    def load(self, quant: Quantisation) -> Weights:
        """Return the model in a format."""
        known = None if self.tokenizer is None else lambda vocab_size: valid_ids(self.tokenizer)
        return weights_module.from_tensors(self._tensors(), dtype=self.dtype, device=self.device, quant=quant, valid_ids=known)

    def runner(self, mode: str) -> Runner:
        """Return the model in one of the modes."""
        weights = self.load(Quantisation("fp8" if mode == W8A8 else mode, self.args.quant_head))
        if mode == W8A8 and self.library is None:
            weights = mapped(weights, lambda weight: replace(weight, rounds_inputs=bool(weight.format)))
        return Runner(weights, self.library, mode)

    def documents(self, path: str) -> list[Document]:
        """Return documents of at most STEP tokens, `--tokens` of them in all."""
        if path.endswith(SHARD):
            found = shard_documents(path, self.plain.weights.output_ids.tolist(), self.plain.weights.shape.vocab_size)
        else:
            found = text_documents(path, self.tokenizer)
        kept, total = [], 0
        for document in found:
            kept.append(Document(document.ids[:STEP], document.counts[:STEP]))
            total += len(kept[-1].ids)
            if total >= self.args.tokens:
                break
        return kept

    def compare(self, runners: list[Runner], documents: list[Document]) -> list["Sums"]:
        """Return what each of the runners, all fed the same documents, adds up to."""
        found = [Sums() for _ in runners]
        for batch in batches(documents):
            ids = [document.ids for document in batch]
            plain = self.plain.log_probs(ids)
            for runner, sums in zip(runners, found, strict=True):
                sums.add(plain, runner.log_probs(ids), batch, self.columns)
        return found

    def lambada(self, runner: Runner) -> float:
        """Return for how many lines, in percent, the model would write the last word."""
        passages = read_passages(self.args.lambada, self.tokenizer, self.args.lambada_lines)
        right, lengths = 0, [len(passage.word) for passage in passages]
        documents = [Document([*passage.before, *passage.word][-STEP:], []) for passage in passages]
        ends = iter(lengths)
        for batch in batches(documents):
            best = runner.log_probs([document.ids for document in batch]).argmax(1)
            start = 0
            for document in batch:
                end, last = start + len(document.ids), next(ends)
                wanted = self.columns[torch.tensor(document.ids[-last:], device=self.device)]
                right += bool((best[end - last - 1 : end - 1] == wanted).all())
                start = end
        return 100 * right / len(documents)


def batches(documents: list[Document]) -> Iterator[list[Document]]:
    """Yield documents that make a step together."""
    batch, total = [], 0
    for document in documents:
        if total + len(document.ids) > STEP or len(batch) == SLOTS:
            yield batch
            batch, total = [], 0
        batch.append(document)
        total += len(document.ids)
    yield batch


def text_documents(path: str, tokenizer: Tokenizer) -> Iterator[Document]:
    """Yield the pieces of a text; each begins as a document does in training, with token 0."""
    for text in Path(path).read_text(encoding="utf-8").split(END_OF_TEXT + "\n"):
        ids = tokenizer.encode(text.strip("\n"))
        for start in range(0, len(ids), STEP - 1):
            piece = [0, *ids[start : start + STEP - 1]]
            yield Document(piece, [True] * len(piece))


def shard_documents(path: str, kept: list[int], vocab_size: int) -> Iterator[Document]:
    """Yield the documents of a shard of the demo model, whose ids count the kept ids first."""
    shard = np.load(path)
    world = np.array(kept + sorted(set(range(vocab_size)) - set(kept)))
    starts = [0, *shard["ends"][:-1]]
    for start, end in zip(starts, shard["ends"], strict=True):
        ids = world[shard["ids"][start:end]].tolist()
        if len(ids) > 1:
            yield Document(ids, [not given for given in shard["given"][start:end].tolist()])


def mapped(weights: Weights, change: Callable[[Weight], Weight]) -> Weights:
    """Return the model with every large matrix changed."""

    def layer_of(layer: BaseLayer) -> BaseLayer:
        values = {field.name: getattr(layer, field.name) for field in fields(layer)}
        return type(layer)(**{name: change(value) if isinstance(value, Weight) else value for name, value in values.items()})

    return replace(weights, layers=[layer_of(layer) for layer in weights.layers], head=change(weights.head))


def off_grid(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with noise as large as the steps of signed bytes with a scale a row."""
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name.endswith(".weight") and name != "emb.weight":
            step = tensor.float().abs().amax(1, keepdim=True) / 127
            noise = torch.rand(tensor.shape, generator=generator) - 0.5
            tensor = tensor + (noise * step).to(tensor.dtype)
        moved[name] = tensor
    return moved


def table_line(row: dict) -> str:
    change = f"{row['change_percent']:+.3f} % ± {row['change_error_percent']:.3f}"
    return f"{row['text']:18}{row['mode']:10}{row['loss']:9.4f}  {change:>20}{row['kl']:11.6f}{row['top1_percent']:9.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", help="default: the demo model")
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--lambada", help='lines of JSON, {"text": ...}')
    parser.add_argument("--lambada-lines", type=int)
    parser.add_argument("--modes", default=",".join((*FORMATS, W8A8)))
    parser.add_argument("--tokens", type=int, default=20_000, help="of each text")
    parser.add_argument("--quant-head", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--off-grid", action="store_true")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ops", choices=("kernels", "reference"), default="kernels")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", help="write the figures to this file, beside those of other models already there")
    args = parser.parse_args()
    if not args.text and not args.lambada:
        parser.error("give --text or --lambada")
    tune_cpu(args.threads or usable_cpus())
    bench = Bench(args)
    texts = {Path(path).stem: bench.documents(path) for path in args.text}
    runners = [bench.runner(mode) for mode in args.modes.split(",")]
    rows, all_texts = [], [Sums() for _ in runners]
    print(f"{'text':18}{'mode':10}{'loss':>9}  {'change':>20}{'KL':>11}{'top-1':>11}")
    for text, documents in texts.items():
        found = bench.compare(runners, documents)
        for runner, sums, total in zip(runners, found, all_texts, strict=True):
            total.documents += sums.documents
            rows.append({"text": text, "mode": runner.mode, **sums.figures()})
            print(table_line(rows[-1]), flush=True)
    if len(texts) > 1:
        for runner, sums in zip(runners, all_texts, strict=True):
            rows.append({"text": "all", "mode": runner.mode, **sums.figures()})
            print(table_line(rows[-1]))
    if args.lambada:
        rows += [{"lambada": r.mode, "accuracy_percent": bench.lambada(r)} for r in (bench.plain, *runners)]
    for row in rows:
        if "lambada" in row:
            print(f"LAMBADA {row['lambada']:10}{row['accuracy_percent']:8.2f} %")
    if args.out:
        write(Path(args.out), bench, rows)


def rounded(value: object) -> object:
    """Return a figure without digits that mean nothing."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write(file: Path, bench: Bench, rows: list[dict]) -> None:
    """Put the figures under the model's and the device's name into the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = json.loads(file.read_text()) if file.exists() else {}
    on_gpu = bench.device.type == "cuda"
    device = torch.cuda.get_device_name(bench.device) if on_gpu else cpu_name()
    notes = {", off grid": bench.args.off_grid, ", head as it is": not bench.args.quant_head}
    kind = "".join(note for note, holds in notes.items() if holds)
    model = bench.file.stem if bench.args.model_path else "demo"
    name = f"{model}{kind}, {device}{'' if bench.library is None else ', kernels'}"
    content[name] = {
        "date": date.today().isoformat(), "device": device, "torch": torch.__version__, "rwkv_batch": __version__,
        "ops": "reference, fp32" if bench.library is None else "kernels, fp16", "quant_head": bench.args.quant_head,
        "rows": [{key: rounded(value) for key, value in row.items()} for row in rows],
    }  # fmt: skip
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
