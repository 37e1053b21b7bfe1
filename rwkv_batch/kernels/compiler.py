"""Builds the CUDA or HIP sources into one shared library on first use, and loads it.

Plain sources with a C ABI: no torch headers, so nvcc or hipcc compiles them in seconds, also on a machine without a GPU. The
library is cached under a hash of sources, flags and compiler; two processes that start together build once.

    python -m rwkv_batch.kernels.compiler cuda sm_80 sm_90a sm_120     compile for these architectures, to check the sources
    python -m rwkv_batch.kernels.compiler hip gfx90a gfx1030

RWKV_BATCH_KERNEL_ARCH=sm_80 has any newer NVIDIA card run what an sm_80 card would: the same sources, compiled for compute_80.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rwkv_batch.config import Config
from rwkv_batch.errors import RwkvBatchError, UsageError
from rwkv_batch.served.glance import is_quantised
from rwkv_batch.shipped import folder

log = logging.getLogger("rwkv_batch.engine")

CACHE_VARIABLE = "RWKV_BATCH_KERNEL_CACHE"  # folder of built libraries; default: rwkv_batch in the user's cache folder
ARCH_VARIABLE = "RWKV_BATCH_KERNEL_ARCH"  # an older architecture to build for; default: the card's own
LEAST = (8, 0)  # compute capability that the sources compile for
PARTS = re.compile(r"^// parts: (\d+)$", re.MULTILINE)  # see cuda/parts.cuh
LEFT_OUT = re.compile(r"^// left out with FP16_ALONE: ([\d ]+)$", re.MULTILINE)
INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
DRIVER = "libcuda.so.1"
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # of the driver's CUdevice_attribute
INSTALL_CUDA = "install the CUDA toolkit, or: pip install -r requirements-cuda.txt"


class KernelError(RwkvBatchError):
    """Kernels cannot be built or loaded; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Toolchain:
    """One compiler and how it is called. `suffix` of its sources, `folder` where they are."""

    name: str
    compiler: str
    folder: Path
    suffix: str
    flags: tuple[str, ...]

    @classmethod
    def cuda(cls) -> "Toolchain":
        """nvcc from PATH, CUDA_HOME or pip's nvidia-cuda-nvcc; KernelError when there is none."""
        return cls("cuda", find_nvcc(), folder("cuda"), ".cu", ("-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden"))

    @classmethod
    def hip(cls) -> "Toolchain":
        """hipcc from PATH or ROCM_PATH; KernelError when there is none."""
        compiler = shutil.which("hipcc") or _existing(Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / "bin" / "hipcc")
        if compiler is None:
            raise KernelError("no hipcc found on PATH or in ROCM_PATH: install ROCm's compiler (Debian: apt install hipcc)")
        flags = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")  # HIP's `__fmul_rn` is a plain `*`
        return cls("hip", compiler, folder("hip"), ".hip", flags)

    def arch_flags(self, arch: str) -> tuple[str, ...]:
        """Flags for one architecture, such as sm_90a or gfx90a; sm_80-on-sm_90: code of sm_80's for a card of sm_90."""
        if self.name == "hip":
            return (f"--offload-arch={arch}",)
        features, _, card = arch.partition("-on-")
        return (f"-gencode=arch={features.replace('sm_', 'compute_')},code={card or arch}",)

    def kind_flags(self, *, quant: bool) -> tuple[str, ...]:
        """Flags for what is compiled: `quant` as of `units`."""
        return () if quant or self.name == "hip" else ("-DFP16_ALONE",)

    def link_flags(self) -> tuple[str, ...]:
        """Flags for linking: pip's nvcc does not find the libraries that lie beside it."""
        packaged = Path(self.compiler).parent.parent / "lib"
        return (f"-L{packaged}",) if (packaged / "libcudart_static.a").exists() else ()

    def sources(self) -> list[Path]:
        """The files to compile."""
        return sorted(self.folder.rglob(f"*{self.suffix}"))

    def units(self, *, quant: bool = True) -> list["Unit"]:
        """What is compiled side by side, by a guess the longest first: parts of sources, then sources by the size of all they
        include.

        quant  whether quantised models are to run too; without, it is less than half the work with nvcc
        """
        found = []
        for source in self.sources():
            plain, text = self.name == "cuda" and not quant, source.read_text()
            if plain and "quant" in source.relative_to(self.folder).as_posix():
                continue
            parts, rest = PARTS.search(text), LEFT_OUT.search(text) if plain else None
            numbers = [*range(int(parts[1]))] if parts else [None]
            found += [Unit(source, number) for number in numbers if rest is None or str(number) not in rest[1].split()]
        return sorted(found, key=lambda unit: (not unit.part, -_extent(unit.source)))

    def digest(self, arch: str, *, quant: bool = True) -> str:
        """Hash of everything the library depends on; `quant` as of `units`."""
        digest = hashlib.sha256()
        version = subprocess.run([self.compiler, "--version"], capture_output=True, text=True, env=_environment(self))
        for part in (self.name, arch, *self.flags, version.stdout, *([] if quant else ["plain"])):
            digest.update(part.encode() + b"\0")
        _add_sources(digest)
        return digest.hexdigest()[:16]


class Unit(NamedTuple):
    """A source, or the part of it with a number: see cuda/parts.cuh."""

    source: Path
    part: int | None

    @property
    def name(self) -> str:
        """What its object is called."""
        return self.source.stem if self.part is None else f"{self.source.stem}-{self.part}"

    @property
    def flags(self) -> str:
        """What tells the compiler which part it is."""
        return "" if self.part is None else f"-DCOMPILED_PART={self.part}"


def sources_digest() -> str:
    """Hash of the kernel sources alone."""
    digest = hashlib.sha256()
    _add_sources(digest)
    return digest.hexdigest()[:16]


def _add_sources(digest: "hashlib._Hash") -> None:
    for top in (folder("cuda"), folder("hip")):
        for file in sorted(top.rglob("*")):
            if file.is_file():
                digest.update(file.relative_to(top.parent).as_posix().encode() + b"\0" + file.read_bytes())


def _extent(source: Path) -> int:
    """Return the bytes of a source and all headers of ours that it includes."""
    seen, new = set(), {source.resolve()}
    while new:
        seen |= new
        included = {(file.parent / name).resolve() for file in new for name in INCLUDE.findall(file.read_text())}
        new = {file for file in included - seen if file.exists()}
    return sum(file.stat().st_size for file in seen)


def find_nvcc() -> str:
    """Return nvcc's path; KernelError, saying where was looked, when there is none."""
    homes = [Path(os.environ[name]) / "bin" / "nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    packaged = sorted(site.glob("*/bin/nvcc"), reverse=True)
    for candidate in [*homes, shutil.which("nvcc"), Path("/usr/local/cuda/bin/nvcc"), *packaged]:
        if candidate and (found := _existing(Path(candidate))):
            return found
    raise KernelError(f"no nvcc found on PATH, in CUDA_HOME or among the pip packages: {INSTALL_CUDA}")


def arch_of_device(index: int) -> str:
    """Return the architecture to build for on GPU `index`."""
    import torch

    if torch.version.hip:
        return torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
    return arch_for(torch.cuda.get_device_capability(index))


def arch_for(card: tuple[int, int]) -> str:
    """Return the architecture to build for on an NVIDIA card of this compute capability; UsageError as of `capability`."""
    built = _built_for(card)
    if built == card:
        return _name(card) + ("a" if card[0] == 9 else "")  # wgmma needs the "a" on Hopper
    return f"{_name(built)}-on-{_name(card)}"


def capability(index: int) -> tuple[int, int]:
    """Return the compute capability that NVIDIA kernels on GPU `index` are built for: (9, 0), or less where it is asked for.

    UsageError when the variable names no architecture, or one that the card cannot run.
    """
    import torch

    card = torch.cuda.get_device_capability(index)
    return card if torch.version.hip else _built_for(card)


def _built_for(card: tuple[int, int]) -> tuple[int, int]:
    wanted = os.environ.get(ARCH_VARIABLE)
    if not wanted:
        return card
    if not re.fullmatch(r"sm_\d{2,3}a?", wanted):
        raise UsageError(f"{ARCH_VARIABLE}: {wanted!r} is no architecture such as sm_80")
    built = divmod(int(wanted[3:].rstrip("a")), 10)
    if not LEAST <= built <= card:
        raise UsageError(f"{ARCH_VARIABLE}: this card runs {_name(LEAST)} to {_name(card)}, not {wanted}")
    return built


def _name(built: tuple[int, int]) -> str:
    return f"sm_{built[0]}{built[1]}"


@functools.cache
def library(index: int = 0, *, quant: bool = True) -> ctypes.CDLL:
    """Return the library for GPU `index` and no other, building it if it is not cached; KernelError when that fails.

    quant  whether quantised models are to run too
    """
    return _load(build(_toolchain(), arch_of_device(index), quant=quant), index)


class Building:
    """The library for a GPU, which a thread builds, or finds in the cache, while its maker does something else.

    quant     whether quantised models are to run too
    required  whether UsageError is raised where there can be none, instead of saying so in the log
    """

    def __init__(self, index: int, *, quant: bool, required: bool = False):
        self._index, self._quant, self._required = index, quant, required
        self._toolchain, self._arch = _toolchain(), arch_of_device(index)
        self._built: Path | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kernels", daemon=True)
        self._thread.start()

    @classmethod
    def begin(cls, index: int, *, quant: bool, required: bool) -> "Building | None":
        """Begin to build; None when there is no compiler."""
        try:
            return cls(index, quant=quant, required=required)
        except KernelError as error:
            return _without(error, required)

    @property
    def busy(self) -> bool:
        """Whether `result` would wait."""
        return self._thread.is_alive()

    def result(self) -> ctypes.CDLL | None:
        """Wait for it; None when it cannot be built."""
        self._thread.join()
        try:
            if self._error is not None:
                raise self._error
            return _load(self._built, self._index)
        except KernelError as error:
            return _without(error, self._required)

    def _run(self) -> None:
        try:
            self._built = build(self._toolchain, self._arch, quant=self._quant)
        except Exception as error:  # for who waits
            self._error = error


def wanted(config: Config) -> bool:
    """Whether a model is to run on kernels where there is a GPU for them."""
    return not config.compile and config.ops in ("auto", "kernels") and config.dtype in ("auto", "fp16")


def build_early(config: Config) -> threading.Thread | None:
    """Begin to build for an NVIDIA GPU while torch, which takes seconds, is imported; None where no kernels are wanted.

    Whoever needs the library finds it in the cache, or waits at the cache's lock. What is built is a guess by what can be known
    without torch; a wrong one costs nothing but time. Nothing is raised or said: that is up to whoever needs the library.
    """
    if config.device == "cpu" or config.model_path is None or not wanted(config):
        return None

    def run() -> None:
        with contextlib.suppress(Exception):
            card = _capability_by_driver(int(config.device.partition(":")[2] or 0))
            quant = config.quant not in ("auto", "none") or is_quantised(Path(config.model_path))
            build(Toolchain.cuda(), arch_for(card), quant=quant)

    thread = threading.Thread(target=run, name="early kernels", daemon=True)
    thread.start()
    return thread


def _capability_by_driver(index: int) -> tuple[int, int]:
    """Return the compute capability of GPU `index`, without torch; OSError where there is none."""
    driver, device, value = ctypes.CDLL(DRIVER), ctypes.c_int(), ctypes.c_int()
    found = []
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        raise OSError(f"no GPU {index}")
    for attribute in (CAPABILITY_MAJOR, CAPABILITY_MINOR):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            raise OSError(f"GPU {index} does not tell what it can do")
        found.append(value.value)
    return found[0], found[1]


def _without(error: KernelError, required: bool) -> None:
    if required:
        raise UsageError(f"--ops kernels: {error.message}", param="ops") from None
    log.error("WITHOUT KERNELS, many times slower: %s", error.message)


def _toolchain() -> Toolchain:
    import torch

    return Toolchain.hip() if torch.version.hip else Toolchain.cuda()


_gpu_of: dict[Path, int] = {}  # of each built file that is loaded


def _load(built: Path, index: int) -> ctypes.CDLL:
    """Load it for GPU `index`; KernelError when that fails.

    What a library prepares, it prepares once, for the GPU that comes first, and the same file is loaded but once: so each
    further GPU of a process has a copy of the file.
    """
    try:
        return ctypes.CDLL(str(built if _gpu_of.setdefault(built, index) == index else _copy(built, index)))
    except OSError as error:
        raise KernelError(f"{built} cannot be loaded: {error}; delete it to have it built again") from None


def _copy(built: Path, index: int) -> Path:
    copy = built.parent / f"copy-{index}" / built.name
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        draft = copy.with_name(f"{copy.name}.{os.getpid()}")
        shutil.copyfile(built, draft)
        os.replace(draft, copy)
    return copy


def library_like(like: ctypes.CDLL, index: int) -> ctypes.CDLL:
    """Return the library of GPU `index`, with kernels for quantised models where `like` has them; KernelError."""
    return library(index, quant=hasattr(like, "rwkv_quant_gemv"))


def build(toolchain: Toolchain, arch: str, cache: Path | None = None, *, quant: bool = True) -> Path:
    """Return the built library, from the cache where it is there. Locks the cache against other processes meanwhile."""
    cache = cache or cache_folder()
    target = cache / f"{toolchain.name}-{arch}-{toolchain.digest(arch, quant=quant)}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            started = time.monotonic()
            log.info("building the %s kernels for %s with %s, once", toolchain.name, arch, toolchain.compiler)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                [built] = _ninja(toolchain, [arch], Path(folder), quant=quant)
                os.replace(built, target)
            log.info("built in %.0f s: %s", time.monotonic() - started, target)
    return target


def cache_folder() -> Path:
    """Where built libraries are kept."""
    if CACHE_VARIABLE in os.environ:
        return Path(os.environ[CACHE_VARIABLE])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rwkv_batch"


def _ninja(toolchain: Toolchain, archs: list[str], folder: Path, *, quant: bool = True) -> list[Path]:
    """Compile all sources side by side and link them; return a library for each architecture."""
    ninja = shutil.which("ninja") or _existing(Path(sys.executable).parent / "ninja")
    if ninja is None:
        raise KernelError("no ninja found: pip install ninja")
    language = "-x hip " if toolchain.name == "hip" else ""
    lines = []
    for arch in archs:
        flags = (*toolchain.flags, *toolchain.kind_flags(quant=quant), *toolchain.arch_flags(arch))
        call = " ".join([toolchain.compiler, *flags])
        units = toolchain.units(quant=quant)
        lines += [
            f"rule compile-{arch}\n  command = {call} $part {language}-c $in -o $out",
            f"rule link-{arch}\n  command = {call} {' '.join(toolchain.link_flags())} -shared $in -o $out",
            *(f"build {arch}-{unit.name}.o: compile-{arch} {unit.source}\n  part = {unit.flags}" for unit in units),
            f"build {arch}.so: link-{arch} {' '.join(f'{arch}-{unit.name}.o' for unit in units)}",
        ]
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    result = subprocess.run([ninja, "-C", folder], capture_output=True, text=True, env=_environment(toolchain))
    if result.returncode:
        raise KernelError(f"the {toolchain.name} kernels do not compile for {', '.join(archs)}:\n{result.stdout[-4000:]}")
    return [folder / f"{arch}.so" for arch in archs]


def _environment(toolchain: Toolchain) -> dict[str, str]:
    return {**os.environ, "HIP_PLATFORM": "amd"} if toolchain.name == "hip" else dict(os.environ)


def _existing(path: Path) -> str | None:
    return str(path) if path.exists() else None


def main(arguments: list[str]) -> int:
    """Compile for the named architectures into a folder that is thrown away."""
    if len(arguments) < 2 or arguments[0] not in ("cuda", "hip"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        toolchain = Toolchain.cuda() if arguments[0] == "cuda" else Toolchain.hip()
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            for arch, built in zip(arguments[1:], _ninja(toolchain, arguments[1:], Path(folder)), strict=True):
                print(f"{arch}: {len(toolchain.sources())} sources, {built.stat().st_size / 1024:.0f} KiB")
        print(f"compiled in {time.monotonic() - started:.0f} s")
    except KernelError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
