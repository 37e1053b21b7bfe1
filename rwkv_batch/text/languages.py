"""The languages that can be translated: codes, the names that prompts use, and which one a text is in.

The codes are those of the browser extension Immersive Translate. A text's script decides first; among languages that share a
script py3langid does. It knows nothing of requests and prompts.
"""

import functools
import re
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_CHARACTERS = 4096  # of one text that are looked at
MAX_TOGETHER = 2**18  # of all texts of a call
MIN_LETTERS = 24  # a text with fewer is judged together with its neighbours
MIN_SHARE = 0.5  # of the probability; below it the text does not tell
MIN_HINT = 0.1  # and below this one it does not even hint

DENSE = {"Han": 3, "Kana": 3, "Hangul": 3}  # a letter of these says as much as so many others

_loading = threading.Lock()


class Language(NamedTuple):
    """What is known of one language: its name in prompts, the script it is written in."""

    name: str
    script: str


def _table(script: str, entries: str) -> dict[str, Language]:
    """`"de German, en English"` -> entries of one script."""
    pairs = (entry.split(maxsplit=1) for entry in entries.split(","))
    return {code: Language(name.strip(), script) for code, name in pairs}


LANGUAGES: dict[str, Language] = (
    _table("Han", "zh-CN Chinese, zh-TW Traditional Chinese, yue Cantonese, wyw Classical Chinese")
    | _table(
        "Latin",
        "af Afrikaans, az Azerbaijani, bs Bosnian, ca Catalan, ceb Cebuano, co Corsican, cs Czech, cy Welsh, da Danish, "
        "de German, en English, eo Esperanto, es Spanish, et Estonian, eu Basque, fi Finnish, fil Filipino, fj Fijian, "
        "fr French, fy Frisian, ga Irish, gd Scottish Gaelic, gl Galician, ha Hausa, haw Hawaiian, hmn Hmong, hr Croatian, "
        "ht Haitian Creole, hu Hungarian, id Indonesian, ig Igbo, is Icelandic, it Italian, jw Javanese, ku Kurdish, la Latin, "
        "lb Luxembourgish, lt Lithuanian, lv Latvian, mg Malagasy, mi Maori, ms Malay, mt Maltese, mww Hmong Daw, nl Dutch, "
        "no Norwegian, ny Chichewa, otq Querétaro Otomi, pl Polish, pt Portuguese, ro Romanian, sk Slovak, sl Slovenian, "
        "sm Samoan, sn Shona, so Somali, sq Albanian, sr-Latn Serbian (Latin), st Sesotho, su Sundanese, sv Swedish, "
        "sw Swahili, tlh Klingon, tn Tswana, to Tongan, tr Turkish, ty Tahitian, uz Uzbek, vi Vietnamese, xh Xhosa, yo Yoruba, "
        "yua Yucatec Maya, zu Zulu",
    )
    | _table(
        "Cyrillic",
        "be Belarusian, bg Bulgarian, kk Kazakh, ky Kyrgyz, mk Macedonian, mn Mongolian, ru Russian, sr Serbian, "
        "sr-Cyrl Serbian (Cyrillic), tg Tajik, uk Ukrainian",
    )
    | _table("Arabic", "ar Arabic, fa Persian, ps Pashto, sd Sindhi, ug Uyghur, ur Urdu")
    | _table("Devanagari", "hi Hindi, mr Marathi, ne Nepali")
    | _table("Hebrew", "he Hebrew, yi Yiddish")
    | _table("Kana", "ja Japanese")
    | _table("Hangul", "ko Korean")
    | _table("Thai", "th Thai")
    | _table("Lao", "lo Lao")
    | _table("Khmer", "km Khmer")
    | _table("Burmese", "my Burmese")
    | _table("Greek", "el Greek")
    | _table("Armenian", "hy Armenian")
    | _table("Georgian", "ka Georgian")
    | _table("Ethiopic", "am Amharic")
    | _table("Sinhala", "si Sinhala")
    | _table("Bengali", "bn Bengali")
    | _table("Gurmukhi", "pa Punjabi")
    | _table("Gujarati", "gu Gujarati")
    | _table("Tamil", "ta Tamil")
    | _table("Telugu", "te Telugu")
    | _table("Kannada", "kn Kannada")
    | _table("Malayalam", "ml Malayalam")
    | _table("pIqaD", "tlh-Qaak Klingon (pIqaD)")
)

OTHER_CODES = {
    "zh": "zh-CN", "zh-hans": "zh-CN", "zh-sg": "zh-CN", "zh-hant": "zh-TW", "zh-hk": "zh-TW", "zh-mo": "zh-TW", "lzh": "wyw",
    "iw": "he", "in": "id", "ji": "yi", "jv": "jw", "nb": "no", "nn": "no", "tl": "fil",
}  # fmt: skip

OTHER_NAMES = {
    "simplified chinese": "zh-CN", "chinese (simplified)": "zh-CN", "chinese (traditional)": "zh-TW",
}  # fmt: skip

# Characters of one script. Order matters: the first of two scripts with equally many letters wins.
SCRIPTS = {
    "Kana": "\u3005\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9d",
    "Hangul": "\u1100-\u11ff\u3131-\u318e\uac00-\ud7a3",
    "Han": "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff",
    "Cyrillic": "\u0400-\u052f",
    "Arabic": "\u0620-\u064a\u066e-\u06d3\u06d5\u06fa-\u06ff\u0750-\u077f\ufb50-\ufdfb\ufe70-\ufefc",
    "Devanagari": "\u0904-\u0939\u0958-\u0961\u0972-\u097f",
    "Hebrew": "\u05d0-\u05f4",
    "Thai": "\u0e01-\u0e30\u0e40-\u0e46",
    "Lao": "\u0e81-\u0eb0\u0ec0-\u0ec6",
    "Khmer": "\u1780-\u17b3",
    "Burmese": "\u1000-\u102a\u103f",
    "Greek": "\u0370-\u03ff\u1f00-\u1fff",
    "Armenian": "\u0531-\u0587",
    "Georgian": "\u10a0-\u10ff\u1c90-\u1cbf",
    "Ethiopic": "\u1200-\u137f",
    "Sinhala": "\u0d85-\u0dc6",
    "Bengali": "\u0985-\u09b9\u09dc-\u09e1\u09f0\u09f1",
    "Gurmukhi": "\u0a05-\u0a39\u0a59-\u0a5e",
    "Gujarati": "\u0a85-\u0ab9",
    "Tamil": "\u0b85-\u0bb9",
    "Telugu": "\u0c05-\u0c39",
    "Kannada": "\u0c85-\u0cb9",
    "Malayalam": "\u0d05-\u0d39",
    "pIqaD": "\uf8d0-\uf8e9",
    "Latin": "A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff",
}
SCRIPT_PATTERNS = {name: re.compile(f"[{ranges}]") for name, ranges in SCRIPTS.items()}

# Character sets of Simplified, Traditional and Japanese writing, old enough that none has what only another one needs.
WRITINGS = ("gb2312", "big5", "shift_jis")

# What texts are in that do not tell: the first, or the second where the first would mean that nothing is to be done.
USUAL = {
    "Latin": ("en", "es"),
    "Cyrillic": ("ru", "uk"),
    "Arabic": ("ar", "fa"),
    "Devanagari": ("hi", "mr"),
    "Hebrew": ("he", "yi"),
}
IDENTIFIER_CODES = {"jw": "jv", "fil": "tl"}  # where py3langid's code is another; what it does not know it cannot find
MANY_TOKENS = frozenset(SCRIPTS) - {"Latin", "Han", "Kana", "Hangul", "Cyrillic", "Arabic", "Hebrew"}

_BY_KEY = (
    {name.lower(): code for code, (name, _) in LANGUAGES.items()}
    | OTHER_NAMES
    | OTHER_CODES
    | {code.lower(): code for code in LANGUAGES}
)  # fmt: skip


def find(text: str) -> str | None:
    """Return the code that `text`, a code or an English name, stands for; None if unknown. A region that is not is dropped."""
    key = text.strip().lower().replace("_", "-")
    while key and key not in _BY_KEY:
        key = key.rpartition("-")[0]
    return _BY_KEY.get(key)


def has_letters(text: str) -> bool:
    """Whether there is anything to translate: numbers of any kind, signs and emoji are not.

    The letters of pIqaD are in no standard, so nothing else calls them letters.
    """
    slices = (text[begin : begin + MAX_CHARACTERS] for begin in range(0, len(text), MAX_CHARACTERS))
    return any(any(map(str.isalpha, part)) or SCRIPT_PATTERNS["pIqaD"].search(part) for part in slices)


class Guess(NamedTuple):
    """A language, and whether it was found rather than assumed; what else it may be, likeliest first, with shares."""

    code: str
    found: bool
    ranking: list[tuple[str, float]]


def detect(texts: Sequence[str], target: str = "") -> list[str]:
    """Return the code of each text's language.

    A text that does not tell is given the language of all texts of its script together, because they come from one page; one
    without letters that of the script with most text. `target` is returned only where it was found: a text for which it would
    have to be assumed is given the likeliest other language.
    """
    limit = min(MAX_CHARACTERS, max(MIN_LETTERS, MAX_TOGETHER // max(len(texts), 1)))
    texts = [text[:limit] for text in texts]
    scripts = [script_of(text) for text in texts]
    together: dict[str, list[str]] = {}
    for script, text in zip(scripts, texts, strict=True):
        together.setdefault(script, []).append(text)
    pooled = {script: "\n".join(group)[:MAX_CHARACTERS] for script, group in together.items() if script}
    pages = {script: _of_page(script, text) for script, text in pooled.items()}
    amount = {script: num_letters(script, text) for script, text in pooled.items()}
    if amount.get("Kana", 0) > amount.get("Han", 0) > 0:
        pages["Han"] = Guess("ja", True, [])  # a few words without kana on a Japanese page
    most = max(amount, key=amount.get, default="")
    pages[""] = pages.get(most, Guess("en", False, []))
    return [_of_text(script, text, pages[script], target) for script, text in zip(scripts, texts, strict=True)]


def script_of(text: str) -> str:
    """Return the script most of `text` is in, "" without letters. Japanese mixes Han into its own, Korean may."""
    counts = Counter({name: num_letters(name, text) * DENSE.get(name, 1) for name in SCRIPT_PATTERNS})
    for own in ("Kana", "Hangul"):
        if counts[own] * 8 > counts["Han"]:
            counts[own] += counts.pop("Han", 0)
    best = max(SCRIPT_PATTERNS, key=lambda name: counts[name])
    return best if counts[best] else ""


def num_letters(script: str, text: str) -> int:
    """How many characters of a script a text has."""
    return len(SCRIPT_PATTERNS[script].findall(text))


def _of_page(script: str, text: str) -> Guess:
    """The language of all texts in one script."""
    if script == "Han":
        code = writing(text)
        return Guess(code or "zh-CN", code is not None, [])
    if script in USUAL:
        ranking = rank(text, script)
        code, share = ranking[0]
        return Guess(code, True, ranking) if share >= MIN_SHARE else Guess(USUAL[script][0], False, ranking)
    return Guess(next(code for code, language in LANGUAGES.items() if language.script == script), True, [])


def _of_text(script: str, text: str, page: Guess, target: str) -> str:
    """The language of one text, of whose neighbours `page` is known."""
    if script == "Han" and page.code != "ja":
        return writing(text) or page.code  # characters that all write are right in each of them
    if script not in USUAL:
        return page.code
    few = page.found and page.code != USUAL[script][0] and num_letters(script, text) < MIN_LETTERS
    if few and page.code != target:
        return page.code
    ranking = rank(text, script)
    likeliest, share = ranking[0]
    if share >= MIN_SHARE:
        return likeliest
    if page.code != target or (page.found and (likeliest == target or share < MIN_HINT)):
        return page.code
    share, code = max((share, code) for code, share in ranking + page.ranking if code != target)
    return code if share >= MIN_HINT else next(code for code in USUAL[script] if code != target)


def writing(text: str) -> str | None:
    """Who writes Han characters like these, by those that others do not have; None where nothing tells them apart."""
    han = "".join(SCRIPT_PATTERNS["Han"].findall(text))
    simplified, traditional, japanese = (set(han.encode(name, "ignore").decode(name)) for name in WRITINGS)
    own = {
        "zh-CN": len(simplified - traditional),
        "zh-TW": len(traditional - simplified),
        "ja": len(japanese - simplified - traditional),
    }
    best = max(own, key=own.get)
    return best if own[best] else None


def rank(text: str, script: str) -> list[tuple[str, float]]:
    """The languages of a script that can be told apart, likeliest first, each with its share of their probability."""
    codes = _identified(script)
    found = [(codes[code], share) for code, share in _identifier().rank(text) if code in codes]
    total = sum(share for _, share in found) or 1.0
    return [(code, share / total) for code, share in found]


@functools.cache
def _identified(script: str) -> dict[str, str]:
    """py3langid's code of each language of a script, and ours."""
    return {IDENTIFIER_CODES.get(code, code): code for code, language in LANGUAGES.items() if language.script == script}


def _identifier() -> Any:
    """py3langid's model, read once from inside its package: 0.7 s and 100 MiB, so only when it is needed."""
    with _loading:
        return _load_identifier()


@functools.cache
def _load_identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
