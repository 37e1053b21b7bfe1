#!/usr/bin/env python3
"""Write a random RWKV-7 checkpoint that loads and runs like a published one.

For measuring speed and checking arithmetic without published weights: same tensor names, same low-rank widths, bf16, and the
same share of zeros after the squared ReLU (random symmetric weights would give 50 % zeros, real
models have 86-90 %, and small-batch speed depends on it).

    python synth_checkpoint.py 7.2b /dev/shm/rwkv7-7.2b.pth [--seed 0] [--device cuda]
"""

import argparse

import torch

# name: (layers, width, rank of w, rank of a, rank of v, rank of g, shift c of the FFN key)
SIZES = {
    "tiny": (2, 128, 32, 32, 32, 32, 1.15),
    "0.1b": (12, 768, 64, 64, 32, 128, 1.15),
    "0.4b": (24, 1024, 64, 64, 32, 128, 1.15),
    "1.5b": (24, 2048, 96, 96, 64, 256, 1.15),
    "2.9b": (32, 2560, 96, 96, 64, 320, 1.25),
    "7.2b": (32, 4096, 128, 128, 96, 480, 1.38),
    "13.3b": (61, 4096, 192, 192, 128, 384, 1.38),
}
HEAD_SIZE = 64
UNUSED_FROM = 65530  # ids the World tokenizer does not have


def synth(
    size: str | tuple, vocab: int = 65536, seed: int = 0, device: str = "cpu", place: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Return the checkpoint as a flat dict of bf16 tensors on `place`, keys in the published order.

    size    a name, or a tuple as in SIZES
    device  where the numbers are drawn; another device draws others
    """
    layers, width, rank_w, rank_a, rank_v, rank_g, shift = SIZES[size] if isinstance(size, str) else size
    gen = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape, std=1.0):
        return torch.randn(*shape, generator=gen, device=device) * std

    def uniform(*shape, lo=0.0, hi=1.0):
        return torch.rand(*shape, generator=gen, device=device) * (hi - lo) + lo

    z: dict[str, torch.Tensor] = {}

    def put(name, tensor):
        z[name] = tensor.bfloat16().to(place)

    put("emb.weight", normal(vocab, width, std=0.05))
    for i in range(layers):
        p = f"blocks.{i}."
        if i == 0:
            put(p + "ln0.weight", torch.ones(width, device=device))
            put(p + "ln0.bias", torch.zeros(width, device=device))
        put(p + "ln1.weight", uniform(width, lo=0.8, hi=1.2))
        put(p + "ln1.bias", normal(width, std=0.02))
        offset = normal(width, std=0.3)
        put(p + "ln2.weight", uniform(width, lo=0.8, hi=1.2))
        put(p + "ln2.bias", offset)
        a = p + "att."
        for n in "rwkvag":
            put(a + "x_" + n, uniform(1, 1, width))
        put(a + "w0", uniform(1, 1, width, lo=-6.0, hi=0.5))
        put(a + "r_k", normal(width // HEAD_SIZE, HEAD_SIZE, std=0.1))
        put(a + "w1", normal(width, rank_w, std=width**-0.5))
        put(a + "w2", normal(rank_w, width, std=0.3 * rank_w**-0.5))
        put(a + "a1", normal(width, rank_a, std=width**-0.5))
        put(a + "a2", normal(rank_a, width, std=0.3 * rank_a**-0.5))
        put(a + "a0", normal(1, 1, width, std=0.5))
        put(a + "g1", normal(width, rank_g, std=width**-0.5))
        put(a + "g2", normal(rank_g, width, std=rank_g**-0.5))
        if i > 0:
            put(a + "v2", normal(rank_v, width, std=0.3 * rank_v**-0.5))
            put(a + "v1", normal(width, rank_v, std=width**-0.5))
            put(a + "v0", uniform(1, 1, width, lo=0.5, hi=1.5))
        put(a + "k_k", uniform(1, 1, width, lo=0.6, hi=1.0))
        put(a + "k_a", uniform(1, 1, width, lo=0.8, hi=1.1))
        for n in ("receptance", "key", "value", "output"):
            put(a + n + ".weight", normal(width, width, std=0.7 * width**-0.5))
        put(a + "ln_x.weight", uniform(width, lo=0.5, hi=1.0))
        put(a + "ln_x.bias", normal(width, std=0.02))
        f = p + "ffn."
        put(f + "x_k", uniform(1, 1, width))
        key_std = width**-0.5
        sigma = key_std * (2 * width / 3) ** 0.5
        put(f + "key.weight", normal(4 * width, width, std=key_std) - shift * sigma * offset / offset.square().sum())
        put(f + "value.weight", normal(width, 4 * width, std=0.3 * (4 * width) ** -0.5))
    put("ln_out.weight", uniform(width, lo=0.8, hi=1.2))
    put("ln_out.bias", normal(width, std=0.02))
    head = normal(vocab, width, std=width**-0.5)
    head[UNUSED_FROM:] = 0
    head[0] = 0  # the end token stays unlikely, so that a timed run is not cut short
    put("head.weight", head)
    return z


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("path")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    z = synth(args.size, args.vocab, args.seed, args.device)
    torch.save(z, args.path)
    print(f"{args.path}: {args.size}, {sum(t.numel() for t in z.values()) / 1e9:.3f} B parameters")


if __name__ == "__main__":
    main()
