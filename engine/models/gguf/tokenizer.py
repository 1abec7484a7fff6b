"""From the metadata of a GGUF file to the tokenizer files of a checkpoint folder.

Two kinds of vocabulary are read: byte-level BPE ("gpt2") with the pre-tokenizer that the file names, and sentencepiece
with scores ("llama"). Keys are those of ggml's docs/gguf.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.gguf_file import Value
from engine.types import ErrorCode, RequestError, shown

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
# Control tokens that end a turn, whatever the file calls its end of text, as ggml takes them.
ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
# Keys that are read here; whatever ends in `_token_id` names a token, which by itself changes no text.
KNOWN = ("model", "pre", "tokens", "token_type", "token_type_count", "scores", "merges", "eos_token_ids")
SWITCHES = ("add_bos_token", "add_eos_token", "add_space_prefix")
# Keys with the one value that is implemented.
ONLY = {
    "add_mask_token": False,
    "add_padding_token": False,
    "add_sep_token": False,
    "add_unknown_token": False,
    "remove_extra_whitespaces": False,
    "escape_whitespaces": True,
    "treat_whitespace_as_suffix": False,
}
# The longest token of a sentencepiece vocabulary that merges are looked for in.
LONGEST = 256

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"


# Of DeepSeek's first tokenizer: the letters that it takes together.
_CASES = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_ASCII_MARKS = r"!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASES}]+",
    rf"\s?[{_MARKS}]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"[{_ASCII_MARKS}][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class Pre:
    """A pre-tokenizer. patterns: what texts are cut by, one after another, none for GPT-2's own. digits: whether these
    stand alone before it. whole_words: whether a word that is a token is taken as it is. normal: the normalization.
    begins: whether texts begin with a token unless the file says."""

    patterns: tuple[str, ...]
    digits: bool = False
    whole_words: bool = False
    normal: str | None = None
    begins: bool = False


PRE = {
    "gpt-2": Pre(()),
    "smollm": Pre((), digits=True),
    "llama-bpe": Pre((_LETTERS + r"\p{N}{1,3}" + _REST,), whole_words=True, begins=True),
    "qwen2": Pre((_LETTERS + r"\p{N}" + _REST,), normal="NFC"),
    "tekken": Pre((_CASED + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1),), whole_words=True),
    "deepseek-coder": Pre(DEEPSEEK_CODER),
    "deepseek-llm": Pre(DEEPSEEK_LLM),
    "deepseek-v3": Pre(DEEPSEEK_V3),
}
PRE["deepseek-r1-qwen"] = replace(PRE["qwen2"], normal=None)
# Other names of files of 2024, and Llama 3's first release, whose words were merged.
PRE |= dict.fromkeys(("llama3", "llama-v3"), PRE["llama-bpe"])
PRE["smaug-bpe"] = Pre(PRE["llama-bpe"].patterns)


def tokenizer_files(metadata: Mapping[str, Value]) -> dict[str, dict[str, Any]]:
    """The contents of tokenizer.json and tokenizer_config.json. Raises RequestError for what is not implemented."""
    reader = _Reader(metadata)
    made = _bpe(reader) if reader.kind == "gpt2" else _sentencepiece(reader)
    return {"tokenizer.json": made, "tokenizer_config.json": _settings(reader)}


def end_ids(metadata: Mapping[str, Value]) -> list[int]:
    """Tokens that end a text or a turn. Raises RequestError as `tokenizer_files` does."""
    reader = _Reader(metadata)
    named = [*(reader.token_id(part) for part in ("eos", "eot", "eom")), *reader.ends]
    spoken = [i for i, token in enumerate(reader.tokens) if reader.types[i] == CONTROL and token in ENDS]
    return list(dict.fromkeys(i for i in (*named, *spoken) if i is not None))


class _Reader:
    """The metadata's `tokenizer.ggml` keys, checked."""

    def __init__(self, metadata: Mapping[str, Value]) -> None:
        self._metadata = metadata
        self.kind = self.read("model", str, "")
        if self.kind not in ("gpt2", "llama"):
            raise _refused(f"tokenizer.ggml.model is {shown(self.kind) or 'missing'}; gpt2 and llama are implemented")
        self.tokens: tuple[str, ...] = self._array("tokens", str)
        self.types: tuple[int, ...] = self._array("token_type", int) or (NORMAL,) * len(self.tokens)
        if not self.tokens or len(self.types) != len(self.tokens):
            raise _refused("tokenizer.ggml.tokens and token_type must have as many items, at least one")
        if len(set(self.tokens)) < len(self.tokens):
            raise _refused("tokenizer.ggml.tokens names a token twice")
        for name, value in metadata.items():
            key = name.removeprefix("tokenizer.ggml.")
            if (
                key == name
                or key in (*KNOWN, *SWITCHES)
                or key.endswith("_token_id")
                or (key in ONLY and value is ONLY[key])
            ):
                continue
            raise _refused(f"{name} = {shown(str(value))} is not implemented")

    def read(self, key: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not default and type(value) is not kind:
            raise _refused(f"tokenizer.ggml.{key} must be of type {kind.__name__}")
        return value

    def _array(self, key: str, *kinds: type) -> tuple[Any, ...]:
        value = self._metadata.get(f"tokenizer.ggml.{key}", ())
        if not isinstance(value, tuple) or not all(type(item) in kinds for item in value):
            raise _refused(f"tokenizer.ggml.{key} must be an array of {kinds[0].__name__}")
        return value

    @property
    def scores(self) -> tuple[float, ...]:
        scores = self._array("scores", float)
        if len(scores) != len(self.tokens):
            raise _refused("tokenizer.ggml.scores must have a score for each token")
        return scores

    @property
    def merges(self) -> list[list[str]]:
        merges = [merge.split(" ") for merge in self._array("merges", str)]
        if not merges or any(len(pair) != 2 for pair in merges):
            raise _refused("tokenizer.ggml.merges must be an array of two tokens each, with a space between")
        known = set(self.tokens)
        if any(left not in known or right not in known or left + right not in known for left, right in merges):
            raise _refused("tokenizer.ggml.merges names tokens that are not in tokenizer.ggml.tokens")
        return merges

    def template(self, key: str) -> str | None:
        value = self._metadata.get(f"tokenizer.{key}")
        if value is not None and not isinstance(value, str):
            raise _refused(f"tokenizer.{key} must be a string")
        return value

    @property
    def templates(self) -> tuple[str, ...]:
        """Names of templates beside the default one."""
        names = self._metadata.get("tokenizer.chat_templates", ())
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise _refused("tokenizer.chat_templates must be an array of strings")
        return tuple(name for name in names if f"tokenizer.chat_template.{name}" in self._metadata)  # type: ignore[misc]

    @property
    def ends(self) -> tuple[int, ...]:
        """What ends a text beside the one token that other keys name."""
        ends: tuple[int, ...] = self._array("eos_token_ids", int)
        if not all(0 <= end < len(self.tokens) for end in ends):
            raise _refused(f"tokenizer.ggml.eos_token_ids holds what is no token of {len(self.tokens)}")
        return ends

    def token_id(self, part: str) -> int | None:
        """Of a special token. Raises RequestError for an id without a token."""
        found: int | None = self.read(f"{part}_token_id", int, None)
        if found is not None and not 0 <= found < len(self.tokens):
            raise _refused(f"tokenizer.ggml.{part}_token_id = {found} is no token of {len(self.tokens)}")
        return found

    def token(self, part: str) -> str | None:
        found = self.token_id(part)
        return None if found is None else self.tokens[found]

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids by token. Rows of the embedding that llama.cpp's converter found no token for have none here."""
        return {
            token: i
            for i, token in enumerate(self.tokens)
            if not (self.types[i] == UNUSED and re.fullmatch(r"\[PAD\d+\]", token))
        }

    def added(self) -> list[dict[str, Any]]:
        """Tokens that are looked for before anything else."""
        return [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": self.types[i] != USER_DEFINED,
            }
            for i, token in enumerate(self.tokens)
            if token and self.types[i] in (CONTROL, UNKNOWN, USER_DEFINED)
        ]

    def around(self, begins: bool) -> dict[str, Any] | None:
        """The template of a text: the tokens that stand before and behind it."""
        before = self.token("bos") if self.read("add_bos_token", bool, begins) else None
        behind = self.token("eos") if self.read("add_eos_token", bool, False) else None
        ids = {token: self.tokens.index(token) for token in (before, behind) if token is not None}
        if not ids:
            return None
        one = [{"Sequence": {"id": "A", "type_id": 0}}]
        two = [*one, {"Sequence": {"id": "B", "type_id": 0}}]
        first, last = (
            [] if token is None else [{"SpecialToken": {"id": token, "type_id": 0}}] for token in (before, behind)
        )
        special = {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in ids.items()}
        return {
            "type": "TemplateProcessing",
            "single": [*first, *one, *last],
            "pair": [*first, *two, *last],
            "special_tokens": special,
        }


def _bpe(reader: _Reader) -> dict[str, Any]:
    named = reader.read("pre", str, "default")
    pre = PRE.get(named)
    if pre is None:
        raise _refused(f"tokenizer.ggml.pre is {shown(named)}, which is not implemented; implemented: {', '.join(PRE)}")
    steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if pre.digits else []
    steps += [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    steps.append(_byte_level(use_regex=not pre.patterns))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": reader.added(),
        "normalizer": None if pre.normal is None else {"type": pre.normal},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": reader.around(pre.begins),
        "decoder": _byte_level(use_regex=True),
        "model": _model(reader.vocabulary, reader.merges, ignore_merges=pre.whole_words),
    }


def _sentencepiece(reader: _Reader) -> dict[str, Any]:
    prefix = reader.read("add_space_prefix", bool, True)
    vocabulary, scores = reader.vocabulary, reader.scores
    plain = [i for i, kind in enumerate(reader.types) if kind in (NORMAL, USER_DEFINED, UNUSED)]
    merges = _merges({reader.tokens[i]: scores[i] for i in plain if len(reader.tokens[i]) <= LONGEST}, vocabulary)
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepends = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    restores: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    unknown = reader.token("unknown")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": reader.added(),
        "normalizer": {"type": "Sequence", "normalizers": [*prepends, replaces]},
        "pre_tokenizer": None,
        "post_processor": reader.around(True),
        "decoder": {
            "type": "Sequence",
            "decoders": [*restores, *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else [])],
        },
        "model": _model(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merges(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[list[str]]:
    """Pairs of tokens that are a token together, in the order that sentencepiece merges them: by the score of what they
    become, the best first."""
    found = []
    for token, score in scores.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                found.append((-score, ids[left], ids[right], left, right))
    found.sort()
    return [[left, right] for *_, left, right in found]


def _settings(reader: _Reader) -> dict[str, Any]:
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    made: dict[str, Any] = {f"{ours}_token": reader.token(theirs) for ours, theirs in special.items()}
    template = reader.template("chat_template")
    named = [{"name": name, "template": reader.template(f"chat_template.{name}")} for name in reader.templates]
    if named:
        made["chat_template"] = [*([] if template is None else [{"name": "default", "template": template}]), *named]
    elif template is not None:
        made["chat_template"] = template
    return {key: value for key, value in made.items() if value is not None}


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _model(vocabulary: dict[str, int], merges: list[list[str]], **own: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
        **own,
    }


def _refused(sentence: str) -> RequestError:
    return RequestError(f"the GGUF file's {sentence}", ErrorCode.UNSUPPORTED)
