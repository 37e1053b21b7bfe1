"""The marks by which other families of models are asked to fill in the middle, found in a prompt that an editor wrote for them.

| Family | Prompt |
|---|---|
| Qwen Coder, CodeGemma, Granite | `<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>` |
| StarCoder, Refact, Stable Code | `<fim_prefix>P<fim_suffix>S<fim_middle>` |
| SantaCoder | `<fim-prefix>P<fim-suffix>S<fim-middle>` |
| GLM | `<|code_prefix|>P<|code_suffix|>S<|code_middle|>` |
| Seed Coder | `<[fim-suffix]>S<[fim-prefix]>P<[fim-middle]>` |
| DeepSeek Coder | `<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>` |
| CodeLlama | `<PRE> P <SUF>S <MID>` |
| Codestral | `[SUFFIX]S[PREFIX]P` |

P is the text before the gap and S that behind it. Either may come first. What stands in front of all marks, as other files do,
comes before P, and what follows the last one is the beginning of the answer.
"""

from typing import NamedTuple


class Gap(NamedTuple):
    """What is to be filled in stands between the two."""

    prefix: str
    suffix: str


class Family(NamedTuple):
    """The marks before the three parts; `padding` is a blank that belongs to the marks. Without `middle` the prefix is last."""

    prefix: str
    suffix: str
    middle: str
    padding: str = ""


FAMILIES = (
    Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    Family("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
    Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    Family("<PRE>", "<SUF>", "<MID>", " "),
    Family("[PREFIX]", "[SUFFIX]", ""),
)
# Marks of files and of the text's beginning, which mean nothing here.
FILE_MARKS = ("<|repo_name|>", "<|file_sep|>", "<reponame>", "<repo_name>", "<file_sep>", "<filename>", "<|file_separator|>")
BEGIN_MARKS = ("<|endoftext|>", "<s>", "<bos>", "<｜begin▁of▁sentence｜>")


def find_gap(prompt: str) -> Gap | None:
    """The gap that a prompt asks to fill by the marks of one family, each of them once; None for any other text."""
    for family in FAMILIES:
        if family.prefix in prompt and family.suffix in prompt and family.middle in prompt:
            gap = _read(prompt, family)
            if gap is not None:
                return gap
    return None


def _read(prompt: str, family: Family) -> Gap | None:
    marks = [mark for mark in family[:3] if mark]
    if any(prompt.count(mark) != 1 for mark in marks):
        return None
    first, second, *last = sorted(marks, key=prompt.index)
    if last and last != [family.middle]:
        return None
    before, _, rest = prompt.partition(first)
    one, _, rest = rest.partition(second)
    other, begun = _split_last(rest, last)
    if family.padding:
        one, other = (_unpadded(part, mark, family) for part, mark in ((one, first), (other, second)))
    prefix, suffix = (one, other) if first == family.prefix else (other, one)
    if not family.middle and first != family.suffix:
        return None  # two words in brackets in any other order are just that
    return Gap(_without_marks(before) + prefix + begun, suffix)


def _split_last(rest: str, last: list[str]) -> tuple[str, str]:
    """The part before the last mark, and what follows it."""
    if not last:
        return rest, ""
    other, _, begun = rest.partition(last[0])
    return other, begun


def _unpadded(part: str, mark: str, family: Family) -> str:
    """A part without the blanks around its marks; there is none behind that of the suffix."""
    part = part.removesuffix(family.padding)
    return part.removeprefix(family.padding) if mark == family.prefix else part


def _without_marks(text: str) -> str:
    for mark in BEGIN_MARKS:
        text = text.removeprefix(mark)
    for mark in FILE_MARKS:
        text = text.replace(mark, "")
    return text
