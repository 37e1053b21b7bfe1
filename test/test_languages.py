"""Language codes, and which language a text is in."""

import re
import time

import pytest

from rwkv_batch.text import languages
from rwkv_batch.text.languages import LANGUAGES, detect, find, has_letters, script_of

CODES = [
    "af", "am", "ar", "az", "be", "bg", "bn", "bs", "ca", "ceb", "co", "cs", "cy", "da", "de", "el", "en", "eo", "es", "et",
    "eu", "fa", "fi", "fil", "fj", "fr", "fy", "ga", "gd", "gl", "gu", "ha", "haw", "he", "hi", "hmn", "hr", "ht", "hu", "hy",
    "id", "ig", "is", "it", "ja", "jw", "ka", "kk", "km", "kn", "ko", "ku", "ky", "la", "lb", "lo", "lt", "lv", "mg", "mi",
    "mk", "ml", "mn", "mr", "ms", "mt", "mww", "my", "ne", "nl", "no", "ny", "otq", "pa", "pl", "ps", "pt", "ro", "ru", "sd",
    "si", "sk", "sl", "sm", "sn", "so", "sq", "sr", "sr-Cyrl", "sr-Latn", "st", "su", "sv", "sw", "ta", "te", "tg", "th",
    "tlh", "tlh-Qaak", "tn", "to", "tr", "ty", "ug", "uk", "ur", "uz", "vi", "wyw", "xh", "yi", "yo", "yua", "yue", "zh-CN",
    "zh-TW", "zu",
]  # fmt: skip


def test_every_code_of_the_extension_has_a_name():
    """Contract 1.8."""
    assert set(LANGUAGES) == set(CODES)
    names = [language.name for language in LANGUAGES.values()]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Z][\w ()]+", name) for name in names)
    assert {language.script for language in LANGUAGES.values()} <= set(languages.SCRIPTS)


def test_simplified_and_traditional_have_names_of_their_own():
    """Contract 1.8: zh-TW is not silently Simplified; zh-CN keeps the trained word."""
    assert LANGUAGES["zh-CN"].name == "Chinese"
    assert LANGUAGES["zh-TW"].name == "Traditional Chinese"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("zh_cn", "zh-CN"), ("ZH-tw", "zh-TW"), ("zh-Hant-HK", "zh-TW"), ("zh", "zh-CN"), ("pt-BR", "pt"), ("iw", "he"),
        ("Korean", "ko"), ("traditional chinese", "zh-TW"), ("Simplified Chinese", "zh-CN"), ("Chinese (Simplified)", "zh-CN"),
        ("Chinese (Traditional)", "zh-TW"), (" en ", "en"), ("sr-Latn", "sr-Latn"), ("xx", None), ("", None),
        ("-", None), ("auto", None),
    ],
)  # fmt: skip
def test_find_takes_codes_names_and_regions(given, code):
    assert find(given) == code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Hello world!", "en"), ("The weather is nice today, so we go for a walk.", "en"),
        ("Das Wetter ist heute schön und wir gehen spazieren.", "de"), ("Bonjour tout le monde, comment allez-vous ?", "fr"),
        ("El tiempo es agradable hoy y salimos a caminar.", "es"), ("Xin chào, hôm nay trời đẹp.", "vi"),
        ("Сегодня хорошая погода, и мы идём гулять.", "ru"), ("Сьогодні гарна погода, і ми йдемо гуляти.", "uk"),
        ("你好世界", "zh-CN"), ("這是一個測試，我們來說話。", "zh-TW"), ("今日は良い天気です。", "ja"),
        ("오늘은 날씨가 좋다", "ko"),
        ("اليوم الطقس جميل ونذهب للمشي", "ar"), ("امروز هوا خوب است و ما به پیاده‌روی می‌رویم", "fa"),
        ("आज मौसम अच्छा है", "hi"), ("วันนี้อากาศดี", "th"), ("היום מזג האוויר נעים", "he"), ("Καλημέρα κόσμε", "el"),
        ("იყო და არა იყო რა", "ka"), ("Բարեւ աշխարհ", "hy"), ("ស្លាមាតពិភពលោក", "km"), ("ሰላም ለዓለም", "am"), ("வணக்கம் உலகம்", "ta"),
    ],
)  # fmt: skip
def test_detection(text, code):
    """Contract 1.8: auto is resolved by script, then by the library."""
    assert detect([text]) == [code]


def test_short_texts_are_judged_with_their_neighbours():
    page = ["Startseite", "Das Wetter ist heute schön und wir gehen alle spazieren.", "OK", "12:30", "Über uns", "你好"]
    assert detect(page) == ["de", "de", "de", "de", "de", "zh-CN"]
    assert detect(["東京", "今日はとても良い天気ですね。"]) == ["ja", "ja"]
    assert detect(["上海", "這是一個很長的句子，我們說中文。"]) == ["zh-TW", "zh-TW"]
    assert detect(["東京", "这是一个很长的句子，我们说中文。"]) == ["zh-TW", "zh-CN"], "only one of the two writes 東 so"
    assert detect([]) == []
    assert detect(["", "123"]) == ["en", "en"]


@pytest.mark.parametrize(
    ("target", "page", "source"),
    [
        ("en", ["Inicio", "Productos", "Contacto", "Carrito", "Iniciar sesión"], "es"), ("en", ["Der Hund frisst Brot."], "de"),
        ("en", ["El perro come pan."], "es"), ("en", ["Guten Morgen"], "de"), ("zh-CN", ["臺灣"], "zh-TW"),
        ("zh-TW", ["台湾"], "zh-CN"), ("zh-CN", ["検索"], "ja"), ("zh-CN", ["佐々木"], "ja"),
    ],
)  # fmt: skip
def test_short_texts_that_hint_at_another_language(target, page, source):
    assert detect(page, target) == [source] * len(page)


@pytest.mark.parametrize(
    ("target", "page"),
    [("en", ["Merhaba"]), ("en", ["Home", "Produkte", "Kontakt"]), ("en", ["OK"]), ("ru", ["Дом"]), ("ar", ["سلام"]),
     ("hi", ["नमस्ते"])],
)  # fmt: skip
def test_a_language_that_is_only_assumed_is_not_the_target(target, page):
    """Decision (p)."""
    assert target not in detect(page, target)
    assert set(detect(page)) == {target}, "without a target it is what such texts usually are in"


def test_what_was_found_to_be_in_the_target_is_in_it():
    english = ["Home", "Good night", "Guten Morgen", "The house is old and nobody lives there today."]
    assert detect(english, "en") == ["en", "en", "de", "en"], "short texts go with the page, but for those that hint otherwise"
    german = ["Startseite", "OK", "Add to cart", "Das Haus ist alt und niemand wohnt heute dort."]
    assert detect(german, "de") == ["de", "de", "en", "de"]
    assert detect(["你好", "国家"], "zh-CN") == ["zh-CN", "zh-CN"]
    assert detect(["これは日本語です。", "東京"], "ja") == ["ja", "ja"]


def test_scripts():
    assert script_of("漢字とかな") == "Kana"
    assert script_of("한국어 漢字") == "Hangul"
    assert script_of("用 PyTorch 训练") == "Han"
    assert script_of("What 中文 means in English") == "Latin"
    assert script_of("1 + 2 = 😀") == ""
    assert all(has_letters(text) for text in ("é", "ไทย", "文", "\uf8d0"))
    assert not has_letters("12:30 — 😀 ∑→ ½ ² ① Ⅳ ٣")


def test_long_texts_take_no_long_time():
    began = time.process_time()
    assert detect(["x" * 5_000_000, "한" * 5_000_000, " " * 5_000_000]) == ["en", "ko", "en"]
    assert time.process_time() - began < 4


def test_many_long_texts_are_only_glanced_at():
    """As many texts as a call may have: what is looked at does not grow with them."""
    detect(["The model is read with the first text."])
    began = time.process_time()
    assert set(detect(["the quick brown fox jumps over " * 130] * 4096)) == {"en"}
    assert time.process_time() - began < 5
