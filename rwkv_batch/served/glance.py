"""A look at a model's file before a process is started for it: whole, of tensors only, and which ones. Milliseconds, no torch.

Nothing in the file is executed, a pickle is not even loaded: its instructions are read one by one. What only the values say,
such as shapes that fit each other and numbers that are finite, the engine's process finds out when it loads the file.
"""

import json
import pickletools
import zipfile
from pathlib import Path

from rwkv_batch.errors import CheckpointError

MAX_HEADER = 2**24  # bytes of the part that names the tensors; the largest models published need a fiftieth of it
MAX_PICKLE = 2**22
PACKED = b"RWKVDEMO"
SAFETENSORS = (".safetensors", ".st")
QUANTISED = "rwkv_batch"  # the entry of a safetensors file's metadata that says how its matrices are quantised
INERT = ("torch", "collections")  # packages whose names stand in a pickle of tensors
FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}


def names_in(file: Path) -> set[str]:
    """Return the names of the tensors in a checkpoint, and perhaps other words; CheckpointError when it is unusable."""
    try:
        size = file.stat().st_size
        if not size:
            raise CheckpointError(f"{file.name}: the file is empty")
        if file.suffix in SAFETENSORS:
            return names_in_safetensors(file, size)
        if file.suffix == ".rwkv":
            return names_in_packed(file)
        return names_in_archive(file, size)
    except OSError as error:
        raise CheckpointError(f"{file.name}: {error.strerror or error}") from None


def is_quantised(file: Path) -> bool:
    """Whether a checkpoint's matrices are quantised already; False too where it cannot be read. OSError."""
    if file.suffix not in SAFETENSORS:
        return False
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        text = opened.read(length) if length <= MAX_HEADER else b""
    try:
        return QUANTISED in json.loads(text).get("__metadata__", {})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return False


def names_in_safetensors(file: Path, size: int) -> set[str]:
    """The same for safetensors."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(size - 8, MAX_HEADER):
            raise CheckpointError(f"{file.name}: not a readable safetensors file, or it was cut off")
        text = opened.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        types = {entry["dtype"] for entry in header.values()}
        wrong = [name for name, entry in header.items() if not all(type(n) is int and n > 0 for n in entry["shape"])]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise CheckpointError(f"{file.name}: its header is not that of a safetensors file") from None
    if not header or wrong:
        raise CheckpointError(f"{file.name}: has no values in {wrong[0][:80] if wrong else 'any tensor'}")
    if any(type(end) is not int for end in ends) or max(ends) != size - 8 - length:
        raise CheckpointError(f"{file.name}: is cut off or damaged: {size:,} bytes are not what its header says")
    if not types & FLOATS:
        raise CheckpointError(f"{file.name}: holds no floating-point numbers")
    return set(header)


def names_in_packed(file: Path) -> set[str]:
    """The same for a packed demo model."""
    with file.open("rb") as opened:
        begin = opened.read(len(PACKED) + 4)
        length = int.from_bytes(begin[len(PACKED) :], "little")
        text = opened.read(length) if begin.startswith(PACKED) and length <= MAX_HEADER else b""
    try:
        return {entry[0] for entry in json.loads(text)["arrays"]}
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        raise CheckpointError(f"{file.name}: not a packed model, or it is damaged") from None


def names_in_archive(file: Path, size: int) -> set[str]:
    """The same for .pth files: torch's archives of stored members, one of which is a pickle."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            pickles = [member for member in members if member.filename.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise CheckpointError(f"{file.name}: not a .pth file of tensors")
            if pickles[0].file_size > MAX_PICKLE:
                raise CheckpointError(f"{file.name}: its list of tensors is over {MAX_PICKLE // 2**20} MiB")
            for member in members:
                if member.compress_type != zipfile.ZIP_STORED or member.header_offset + member.file_size > size:
                    raise CheckpointError(f"{file.name}: damaged .pth file (member {member.filename[:80]!r})")
            data = archive.read(pickles[0])
    except (zipfile.BadZipFile, NotImplementedError, ValueError, RuntimeError, EOFError):
        raise CheckpointError(f"{file.name}: no complete .pth file; cut off, damaged, or something else") from None
    return words_of(data, file.name)


def words_of(data: bytes, name: str) -> set[str]:
    """Return the texts in a pickle; CheckpointError where it names anything that is not of tensors."""
    words: set[str] = set()
    last: list[str] = []  # texts of the latest instructions: two of them make a name in newer pickles
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in ("GLOBAL", "INST"):
                check_global(argument, name)
            elif opcode.name == "STACK_GLOBAL":
                check_global(last[-2] if len(last) > 1 else "?", name)
            elif opcode.name.startswith("EXT"):
                check_global("a registered extension", name)
            elif isinstance(argument, str):
                words.add(argument)
                last = [*last[-1:], argument]
    except (ValueError, UnicodeDecodeError, IndexError):
        raise CheckpointError(f"{name}: its list of tensors is damaged") from None
    return words


def check_global(text: str, name: str) -> None:
    """Raise CheckpointError unless `text`, a module and perhaps a name behind a blank, is of a package that tensors need."""
    if text.split()[:1] and text.split()[0].split(".")[0] in INERT:
        return
    raise CheckpointError(f"{name}: holds more than tensors, nothing in it was run; only plain checkpoints load")
