"""Bodies that are almost right: one valid example of each route, then changed with knowledge of what JSON is made of.

Everything is drawn from one `random.Random`, so a seed names a run. Knows nothing of servers.
"""

import copy
import functools
import json
import random
import re
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

MESSAGES = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "system", "content": "be nice"},
    *MESSAGES,
    {"role": "assistant", "content": "<think>x</think>y"},
    {"role": "tool", "content": [{"type": "text", "text": "z"}]},
]
SAMPLING = {"temperature": 0.8, "top_k": 50, "top_p": 0.6, "alpha_presence": 1.0, "alpha_frequency": 0.1, "alpha_decay": 0.99}
NATIVE = {"contents": ["a", "你好"], "max_tokens": 4, "stop_tokens": [0, 261, "\n\n"], "seed": 3, **SAMPLING}
CHAT = {"messages": TALK, "max_tokens": 4, "logprobs": True, "top_logprobs": 3, "n": 2, "stop": ["a"], "seed": 5}
CHATS = [
    {**CHAT, "logit_bias": {"50": 1.5}, "stream": True, "stream_options": {"include_usage": True}, "presence_penalty": 0.5},
    {
        "messages": MESSAGES,
        "max_tokens": 4,
        "think_type": "free",
        "session_id": "f1",
        "separate_reasoning": True,
        "min_tokens": 2,
    },
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":"b"}'}}
CHATS += [
    {
        "messages": [
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "content": "c"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}, {"type": "web_search"}],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        },
        "parallel_tool_calls": False,
        "max_tokens": 4,
    },
    {"messages": MESSAGES, "functions": [FUNCTION], "function_call": {"name": "f"}, "max_tokens": 9, "stream": True},
]
COMPLETIONS = [
    {"prompt": ["Once", "upon"], "max_tokens": 3, "echo": True, "logprobs": 2, "n": 2, "stop": ["\n"], "suffix": None},
    {"prompt": [[1, 2, 3], [4]], "max_tokens": 0, "echo": True, "logprobs": 1},
    {"prompt": "a", "suffix": "b", "max_tokens": 3, "best_of": 1, "stream": True},
]
RESPONSES = [
    {"input": "Hello", "max_output_tokens": 4, "instructions": "be nice", "store": True, "metadata": {"a": "b"}},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "stream": True, "max_output_tokens": 4},
    {"input": "a", "previous_response_id": "resp_none", "reasoning": {"effort": "low"}, "max_output_tokens": 4},
    {
        "input": [
            {"role": "user", "content": "x"},
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "y"},
            {"type": "reasoning", "summary": []},
        ],
        "tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "g", "format": {"type": "text"}}],
        "tool_choice": "required",
        "max_output_tokens": 9,
    },
]
TOLD = [
    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "s"}, {"type": "text", "text": "y"}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "z"}]}]},
]
USES = {"tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}], "tool_choice": {"type": "tool", "name": "f"}}
MESSAGE = {"messages": TOLD, "max_tokens": 4, "system": [{"type": "text", "text": "be nice"}], "stop_sequences": ["a"]}
INFILL = {
    "input_prefix": "def add(a, b):\n", "input_suffix": "\n    return c\n", "prompt": "    c =", "samplers": ["top_k", "top_p"],
    "input_extra": [{"text": "x = 1\n", "filename": "x.py"}], "top_k": 40, "top_p": 0.9, "cache_prompt": True,
}  # fmt: skip
TURN = {"contents": ["User: a\n\nAssistant:"], "session_id": "f2", "max_tokens": 4}
TRANSLATE = {
    "source_lang": "auto",
    "target_lang": "zh-CN",
    "text_list": ["Hi {0} <b0>x</b0>\n\nnew"],
    "placeholders": ["abc"],
}

EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [NATIVE, {**NATIVE, "stream": True, "chunk_size": 1}, *CHATS],
    "/v1/messages": [
        {**MESSAGE, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "metadata": {"user_id": "u"}},
        {**MESSAGE, "stream": True, "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}},
        {**MESSAGE, **USES, "max_tokens": 9},
    ],
    "/v1/messages/count_tokens": [{"messages": TOLD, "system": "be nice", "thinking": {"type": "adaptive"}}],
    "/api/chat": [
        {"messages": TALK[:3], "options": {"num_predict": 4, "temperature": 0.5, "stop": ["a"], "seed": 3}, "stream": False},
        {"messages": MESSAGES, "options": {"num_predict": 4, "top_k": 9}, "think": True, "keep_alive": "5m", "format": ""},
        {
            "messages": MESSAGES,
            "options": {"num_predict": 4},
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        },
        {"messages": [], "keep_alive": 0},
    ],
    "/api/generate": [
        {"prompt": "a", "suffix": "b", "options": {"num_predict": 4}},
        {"prompt": "a", "system": "be nice", "options": {"num_predict": 4}, "stream": False, "think": "low"},
        {"prompt": "a", "raw": True, "options": {"num_predict": 4, "repeat_penalty": 1.0}},
    ],
    "/api/show": [{"model": "m", "verbose": True}],
    "/infill": [
        {**INFILL, "n_predict": 4, "response_fields": ["content", "timings/prompt_n", "truncated"]},
        {**INFILL, "n_predict": 4, "stream": True, "seed": -1},
        {**INFILL, "n_predict": 0},
    ],
    "/completion": [
        {"prompt": "a", "n_predict": 4, "temperature": 0.5, "stop": ["b"], "logit_bias": [[5, 1.5], [6, False]], "n_cmpl": 2},
        {"prompt": [1, 2, 3], "n_predict": 4, "stream": True, "repeat_penalty": 1.0, "cache_prompt": False},
        {"prompt": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", "n_predict": 4},
    ],
    "/v2/chat/completions": [{**NATIVE, "pad_zero": True}, {**NATIVE, "stream": True}],
    "/v3/chat/completions": [{"messages": TALK, "max_tokens": 4, "enable_think": True}, {**NATIVE, "stream": True}],
    "/FIM/v1/batch-FIM": [{"prefix": ["a", "b"], "suffix": ["c", "d"], "max_tokens": 4, "stream": stream} for stream in (0, 1)],
    "/translate/v1/batch-translate": [TRANSLATE, {"source_lang": "en", "target_lang": "de", "text_list": ["a", ""]}],
    "/v1/immersive_translate": [
        TRANSLATE,
        {"text": "hi", "from": "en", "to": "de"},
        {"texts": ["hi"], "from": "auto", "to": "de"},
    ],
    "/big_batch/completions": [{"contents": ["a"], "max_tokens": 4}, {"chats": ["a"], "noise": 1.0, "max_tokens": 4}],
    "/big_batch/clean": [{}],
    "/v1/batch/completions": [NATIVE, {"prompts": ["a", "b"], "max_tokens": 4, "noise": 0.5}],
    "/v1/tokens/count": [{"contents": ["a", "b"]}, {"text": "a"}, {"messages": TALK}],
    "/v1/server/stop": [{"request_id": "nobody"}],
    "/state/chat/completions": [
        {**TURN, "idempotency_key": "k", "expect_version": 0},
        {**TURN, "stream": True},
        {**TURN, "contents": ["a", "b"], "keep": False},
    ],
    "/multi_state/chat/completions": [{**TURN, "session_id": "f3", "dialogue_idx": 0}],
    "/state/status": [{"session_id": "f2"}, {"limit": 5, "offset": 0}],
    "/state/delete": [{"session_id": "f2", "delete_prefix": True}],
    "/state/fork": [{"session_id": "f2", "copies": ["f4", "f5"], "version": 1}],
    "/state/rewind": [{"session_id": "f2", "version": 1, "expect_version": 2}],
    "/state/export": [{"session_id": "f2", "version": 1}],
    "/loadstatemodel": [
        {
            "state_filename": "a.pth",
            "state_viewname": "a",
            "default_temperature": "1.0",
            "default_top_p": 0.3,
            "transpose": True,
        }
    ],
    "/removestatemodel": [{"state_viewname": "a"}],
    "/mrss_loadstatemodel": [
        {
            "state_viewname": "a",
            "state_filenames": ["a.pth", "states/b.st"],
            "contain_originalstate": True,
            "state_gatingweight": [0.5, 0.3, 0.2],
            "default_temperature": 1.0,
            "default_top_p": 0.5,
            "replace": False,
        }
    ],
    "/mrss_set_gatingweight": [{"state_viewname": "a", "state_gatingweight": [0.5, 0.5]}],
    "/loadadapter": [
        {
            "adapter_filename": "adapters/a.pth",
            "adapter_viewname": "a",
            "adapter_scaling": 0.5,
            "default_temperature": 1.0,
            "default_top_p": 0.5,
            "replace": False,
        },
        {"adapter_filename": "a.pth", "adapter_viewname": "a", "lora_alpha": 32},
    ],
    "/removeadapter": [{"adapter_viewname": "a"}],
    "/loadmodel": [
        {
            "model_filename": "models/a.pth",
            "model_viewname": "a",
            "model_strategy": "fp16",
            "adapter_filename": "b.pth",
            "adapter_mode": "lora",
            "default_temperature": "1.0",
            "default_top_p": "",
            "endtoken": "\\n\\n",
            "keep": True,
        }
    ],
    "/removemodel": [{"model_viewname": "a"}],
    "/switch-model": [{"model": "a.pth", "strategy": "fp16"}],
}
OPENAI: dict[str, list[dict[str, Any]]] = {  # under any of OpenAI's bases
    "/chat/completions": CHATS,
    "/completions": COMPLETIONS,
    "/responses": RESPONSES,
    "/responses/input_tokens": RESPONSES,
    "/fim/completions": [{"prompt": "a", "suffix": "b", "max_tokens": 4, "random_seed": 5, "stream": True, "stop": ["c"]}],
    "/embeddings": [{"input": "x"}],
    "/tokenize": [{"prompt": "Hello", "add_special_tokens": True}, {"messages": TALK}],
    "/detokenize": [{"tokens": [1, 2, 65529]}],
    "/apply_template": [{"messages": TALK}],
    "/apply-template": [{"messages": MESSAGES, "add_generation_prompt": False}],
}


def examples(path: str) -> list[dict[str, Any]]:
    """Valid bodies of a route. Raises KeyError for one that has none here."""
    if path in EXAMPLES:
        return EXAMPLES[path]
    return OPENAI[path.removeprefix("/openai").removeprefix("/v1")]


DEEP = functools.reduce(lambda inside, level: [inside] if level % 2 else {"a": inside}, range(60), "x")
HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, -1e308, 1e-320, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64),
    *(-(2**63) - 1, 10**30, 65529, 65530, 65535, 65536, "", "0", "5", "5.0", "nan", "inf", "-1", "a", "\0", "\n\n", "\u2028"),
    *("😀", "💥" * 50, "e\u0301" * 99, "\u202e", "\ufeff", "x" * 5000, "User:", "✿", "<|endoftext|>", "</think>", "\\", '"'),
    *("../../etc/passwd", "'; DROP TABLE kept_sessions;--", "f2:1", ":", "f3:0", "%00", "${jndi:x}", "<script>", "{0}", "<b0>"),
    *([], {}, [[]], [None], [0], [[0]], ["a"], [1, "a"], {"a": 1}, {"type": "text"}, {"text": 5}, [{}], [{"role": "user"}]),
    *([{"role": "x", "content": "y"}], [65535], [65530], [-1], [2**31], {"65535": 100}, {"-1": 1}, {"1": -100}, {"7": "a"}),
    *([0] * 300, ["a"] * 60, [""] * 3, dict.fromkeys(map(str, range(300)), 1), DEEP),
]
FIELDS = [
    "password", "session_id", "messages", "contents", "prompt", "keep", "copies", "logit_bias", "stop_tokens", "stop", "stream",
    "pad_zero", "ignore_eos", "text", "idempotency_key", "use_prefix_cache", "echo", "tools", "response_format", "n",
    "chunk_size", "min_tokens", "logprobs", "top_logprobs", "noise", "seed", "dialogue_idx", "expect_version", "version",
    "temperature", "top_k", "top_p", "alpha_presence", "alpha_decay", "presence_penalty",
]  # fmt: skip
SIZES = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict")
RAW = [
    *(b"NaN", b"-Infinity", b"1e400", b"-0", b"01", b"1.", b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff"', b'"\xc0\x80"'),
    b"1" * 5000,
    *(b"[" * 100, b'{"a":' * 70, b"", b"tru", b'"\\u0000"', b'"\x01"', b"9" * 26, b"1E+2", b'"\\x"', b'"' + b'\\"' * 2000),
    *(b"[" * 65 + b'"' + b'\\"' * 500, b'"' + b"\\\\" * 999, b"-" * 99, b"0." + b"0" * 2000 + b"1", b"/**/1", b"'a'"),
]
VALUE = re.compile(rb': ?(-?[0-9.]+|"[^"\\]*"|true|false|null)')
HEADERS = (
    *("Content-Type", "Accept", "Idempotency-Key", "X-Request-Id", "Authorization", "X-Api-Key", "Content-Encoding"),
    *("X-Forwarded-For", "Accept-Encoding", "Accept-Language", "Cookie", "User-Agent", "If-Match"),
)
HEADER_VALUES = (
    *("application/json", "text/plain", "x" * 300, "\xff\xfe", "Bearer ", "Bearer x", "Basic eDp5", "identity", "gzip", "*/*"),
    *("a b", "null", "0", "{}", "text/event-stream", ";;;", "0, 0", "\t"),
)
QUERIES = ("?token=x", "?session_id=q", "?a=%ff&b=%00", "?" + "a" * 500, "?token=%", "?overwrite=true&session_id=", "?&&==")


@dataclass
class Case:
    """One request of the run."""

    path: str
    body: bytes | None = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


class Mutator:
    """Draws cases. `state_file` is an exported session, for the route that takes one; `max_size` bounds what is generated."""

    def __init__(self, seed: int, state_file: bytes, max_size: int = 6):
        self.rng = random.Random(seed)
        self.state_file = state_file
        self.max_size = max_size

    def case(self, path: str) -> Case:
        """A request of a route, more or less."""
        if path == "/state/import":
            return Case(f"{path}?session_id=i{self.rng.randrange(9)}&overwrite=true{self._maybe(QUERIES)}", self._file())
        foreign = self.rng.random() < 0.05  # the body of another route
        body: Any = copy.deepcopy(self.rng.choice(examples(self.rng.choice(list(EXAMPLES)) if foreign else path)))
        for _ in range(self.rng.choice((0, 1, 1, 1, 1, 2))):
            body = self._changed(body)
        self._bound(body)
        data = json.dumps(body, ensure_ascii=self.rng.random() < 0.5).encode("utf-8", "surrogatepass")
        headers = {self.rng.choice(HEADERS): self.rng.choice(HEADER_VALUES)} if self.rng.random() < 0.1 else {}
        return Case(path + self._maybe(QUERIES), self._bytes_changed(data), headers=headers)

    def without_body(self, method: str, path: str) -> Case:
        """A request of a route that takes none; the path's variable part is anything."""
        filled = re.sub(r"[:*]\w+", quote(str(self._hostile())[:200], safe=self.rng.choice(("", "/"))), path)
        return Case(filled + self._maybe(QUERIES), method=method)

    def _maybe(self, values: tuple[str, ...]) -> str:
        return self.rng.choice(values) if self.rng.random() < 0.1 else ""

    def _hostile(self) -> Any:
        return copy.deepcopy(self.rng.choice(HOSTILE))

    def _changed(self, value: Any) -> Any:
        """A value with one thing in it changed, at any depth."""
        rng, way = self.rng, self.rng.random()
        if isinstance(value, dict) and value and way < 0.9:
            key = rng.choice(list(value))
            way = rng.random()
            if way < 0.12:
                del value[key]
            elif way < 0.24:
                value[rng.choice((key + "x", key.upper(), "", *FIELDS))] = self._hostile()
            elif way < 0.6:
                value[key] = self._hostile()
            else:
                value[key] = self._changed(value[key])
            return value
        if isinstance(value, list) and value and way < 0.8:
            at, way = rng.randrange(len(value)), rng.random()
            if way < 0.2:
                del value[at]
            elif way < 0.35:
                value.extend(copy.deepcopy(value) * rng.choice((1, 1, 9)))
            elif way < 0.6:
                value[at] = self._hostile()
            else:
                value[at] = self._changed(value[at])
            return value
        return self._tweaked(value) if rng.random() < 0.4 else self._hostile()

    def _tweaked(self, value: Any) -> Any:
        rng = self.rng
        if isinstance(value, bool):
            return rng.choice((not value, int(value), str(value)))
        if isinstance(value, int):
            return rng.choice((value + 1, value - 1, -value, value + 2**31, float(value), str(value), [value]))
        if isinstance(value, float):
            return value * rng.choice((-1, 0, 1e10, 1e-10, 1e-310))
        if isinstance(value, str):
            return rng.choice((value[::-1], value * rng.randrange(40), value[: len(value) // 2], [value], value.encode().hex()))
        return [value]

    def _bound(self, body: Any) -> None:
        """Keep the work small: what is not bounded generates thousands of tokens, as it should."""
        if not isinstance(body, dict):
            return
        if isinstance(body.get("options"), dict):
            self._bound(body["options"])
        for name in SIZES:
            value = body.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and 20 < value < 2**31:
                body[name] = self.max_size
        if not any(isinstance(body.get(name), int | float) for name in SIZES) and self.rng.random() < 0.9:
            body["max_output_tokens" if "input" in body else "max_tokens"] = 3

    def _bytes_changed(self, data: bytes) -> bytes:
        """Sometimes no longer JSON, or no longer UTF-8."""
        rng, way = self.rng, self.rng.random()
        if way < 0.06:
            found = list(VALUE.finditer(data))
            if not found:
                return rng.choice(RAW)
            match = rng.choice(found)
            return data[: match.start()] + b":" + rng.choice(RAW) + data[match.end() :]
        if way < 0.09 and data.startswith(b"{") and len(data) > 2:  # a field twice
            name, value = (json.dumps(thing).encode() for thing in (rng.choice(FIELDS), self._hostile()))
            return b"{" + name + b":" + value + b"," + data[1:]
        if way < 0.12:
            return data[: rng.randrange(len(data) + 1)]
        if way < 0.14:
            text = data.decode("utf-8", "replace")
            return text.encode(rng.choice(("utf-16", "utf-8-sig", "utf-32-le", "latin-1")), "replace")
        if way < 0.15:
            return zlib.compress(data)
        return self._scrambled(data) if way < 0.2 else data

    def _scrambled(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.rng.choice((1, 1, 2, 5))):
            at, way = self.rng.randrange(len(changed) + 1), self.rng.random()
            if way < 0.4 and at < len(changed):
                changed[at] = self.rng.randrange(256)
            elif way < 0.6:
                del changed[at : at + self.rng.randrange(1, 20)]
            elif way < 0.8:
                changed[at:at] = self.rng.choice(RAW)
            else:
                changed[at:at] = changed[max(0, at - 30) : at]
        return bytes(changed)

    def _file(self) -> bytes:
        """The exported session with a changed header, under a right checksum, or with changed bytes."""
        way = self.rng.random()
        if way < 0.2:
            return self._scrambled(self.state_file)
        if way < 0.3:
            return self.state_file[: self.rng.randrange(len(self.state_file))]
        magic, version, length = struct.unpack_from("<8sII", self.state_file)
        header = json.loads(self.state_file[16 : 16 + length])
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            header = self._changed(header)
        text = json.dumps(header).encode()
        states = bytearray(self.state_file[16 + length : -4])
        if way > 0.8:  # numbers that no state has
            at = self.rng.randrange(0, len(states) - 4, 4)
            states[at : at + 4] = struct.pack("<f", self.rng.choice((float("nan"), float("inf"), 3e38, -1e30)))
        data = (
            struct.pack("<8sII", magic, self.rng.choice((version, version, version, 0, 2**32 - 1)), len(text)) + text + states
        )
        return data + struct.pack("<I", zlib.crc32(data))
