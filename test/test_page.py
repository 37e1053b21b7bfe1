"""The files of the built-in page as they are served; `test/web/` drives it in a browser."""

import gzip
import re
from types import SimpleNamespace

import pytest

from routes import page

JS = {name: file.data.decode() for name, file in page.FILES.items() if name.startswith("js/")}


def get(name: str = "index.html", **headers: str):
    return page.reply(SimpleNamespace(headers=headers), name)


def test_a_browser_gets_the_page_and_others_json():
    assert page.is_asked_for(SimpleNamespace(headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}))
    for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        assert not page.is_asked_for(SimpleNamespace(headers=accept))


def test_every_file_is_named_by_the_page_or_a_module_and_exists():
    html = page.FILES["index.html"].data.decode()
    named = set(re.findall(r'(?:src|href)="/web/([^"]+)"', html))
    for text in JS.values():
        named |= {f"js/{path}" for path in re.findall(r'from "\./([^"]+)"', text)}
        named |= set(re.findall(r'from "\.\./([^"]+)"', text))
    assert named <= set(page.FILES)
    assert set(page.FILES) - named <= {"index.html", "vendor/LICENSES.txt"}


def test_all_together_fit_in_300_kb_and_nothing_comes_from_elsewhere():
    assert sum(len(file.compressed) for file in page.FILES.values()) <= 300_000
    for name, file in page.FILES.items():
        if not name.startswith("vendor/"):
            assert not re.search(r'(?:src|href|url\()\s*=?\s*["\']?(?:https?:)?//', file.data.decode()), name


def test_the_policy_lets_no_inline_script_and_no_foreign_host_in():
    policy = get().headers["Content-Security-Policy"]
    assert not re.search(r"unsafe|http|\*", policy)
    for part in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"):
        assert part in policy
    html = page.FILES["index.html"].data.decode()
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", html)


def test_a_file_is_sent_compressed_once_and_then_only_its_absence_of_change():
    first = get(**{"accept-encoding": "gzip, br"})
    assert gzip.decompress(first.body) == page.FILES["index.html"].data
    again = get(**{"if-none-match": first.headers["ETag"]})
    assert (again.status, again.body) == (304, b"")
    assert get().body == page.FILES["index.html"].data


@pytest.mark.parametrize("name", [name for name in JS if name != "js/i18n.js"])
def test_every_text_has_its_words_in_both_languages(name):
    words = dict(re.findall(r'(\w+): \[("(?:[^"\\]|\\.)*", "(?:[^"\\]|\\.)*")\]', JS["js/i18n.js"]))
    used = set(re.findall(r'(?:i18n|label|hint): "(\w+)"', JS[name])) | set(re.findall(r'\bt\("(\w+)"\)', JS[name]))
    used |= set(re.findall(r'\bfield\("(\w+)"', JS[name])) | set(re.findall(r'title: "(\w+)"', JS[name]))
    assert used <= set(words), used - set(words)


def test_model_text_becomes_html_in_one_place_only():
    for name, text in JS.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
        assert ("purify" in text) == (name == "js/markdown.js")
