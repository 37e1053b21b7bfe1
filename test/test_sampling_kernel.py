"""The arguments of `rwkv_sample` in Python and in C, compared without a GPU; what it samples: test_gpu_sampling.py."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from rwkv_batch.shipped import folder
from sampling.kernel import METHODS, TYPES, KernelSampler, SampleArgs, check_layout, method_codes

PROGRAM = """
#include "args.h"
#include <cstddef>
#include <cstdio>
int main() {{
    std::printf("%zu\\n", sizeof(rwkv::SampleArgs));
    {fields}
    {methods}
}}
"""


class Library:
    """Kernels with arguments of `size` bytes and these methods."""

    def __init__(self, size: int, methods: tuple[str, ...] = METHODS):
        self.rwkv_sample_args_size = lambda: size
        self.rwkv_sample_takes = lambda code: 1

        def method(name: bytes) -> int:
            return methods.index(name.decode()) if name.decode() in methods else -1

        self.rwkv_sample_method = method


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[list[str]]:
    """What a C++ compiler makes of args.h: its size; name, offset and size of each field; name and code of each method."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    fields = [
        f'std::printf("{name} %zu %zu\\n", offsetof(rwkv::SampleArgs, {name}), sizeof(rwkv::SampleArgs::{name}));'
        for name, _ in SampleArgs._fields_
    ]
    methods = [f'std::printf("%s %d\\n", rwkv::METHOD_NAMES[rwkv::{name.upper()}], rwkv::{name.upper()});' for name in METHODS]
    at: Path = tmp_path_factory.mktemp("args")
    (at / "layout.cpp").write_text(PROGRAM.format(fields="\n    ".join(fields), methods="\n    ".join(methods)))
    headers = folder("cuda") / "sampling"
    subprocess.run([compiler, "-std=c++17", f"-I{headers}", at / "layout.cpp", "-o", at / "layout"], check=True)
    printed = subprocess.run([at / "layout"], check=True, capture_output=True, text=True).stdout
    return [line.split() for line in printed.splitlines()]


def test_every_field_lies_where_c_has_it(compiled):
    assert int(compiled[0][0]) == ctypes.sizeof(SampleArgs)
    for (name, _), line in zip(SampleArgs._fields_, compiled[1:], strict=False):
        field = getattr(SampleArgs, name)
        assert line == [name, str(field.offset), str(field.size)]


def test_every_method_has_its_name_in_c(compiled):
    methods = compiled[1 + len(SampleArgs._fields_) :]
    assert [name for name, _ in methods] == list(METHODS)
    assert len({code for _, code in methods}) == len(METHODS)


def test_kernels_of_another_layout_are_refused():
    check_layout(Library(ctypes.sizeof(SampleArgs)))
    with pytest.raises(RuntimeError, match=f"{ctypes.sizeof(SampleArgs) + 8} bytes"):
        check_layout(Library(ctypes.sizeof(SampleArgs) + 8))


def test_kernels_without_a_method_are_refused():
    assert method_codes(Library(0)) == {name: code for code, name in enumerate(METHODS)}
    with pytest.raises(RuntimeError, match="no method rejection"):
        method_codes(Library(0, METHODS[:-1]))


def test_kernels_for_fp16_alone_get_nothing_else():
    """As those that are built for models that are not quantised."""
    types = []

    def sample(args, stream) -> int:
        types.append(args._obj.type)
        return 0

    library = Library(ctypes.sizeof(SampleArgs))
    library.rwkv_sample = sample
    slots, logits = torch.arange(2), torch.zeros(2, 9)
    for takes in (lambda code: 1, lambda code: code == TYPES[torch.float16]):
        library.rwkv_sample_takes = takes
        sampler = KernelSampler(2, torch.arange(9), "cpu", library)
        for dtype in TYPES:
            sampler.launch(logits.to(dtype), slots, stream=0)
    assert types == [*TYPES.values(), *[TYPES[torch.float16]] * 3]
