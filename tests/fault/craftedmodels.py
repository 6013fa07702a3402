"""Crafted models: a small model's folder, or a GGUF header, with one thing in it that no model has."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Change = Callable[[Path], None]
SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size", "head_dim")
OTHER = (
    "intermediate_size",
    "max_position_embeddings",
    "eos_token_id",
    "bos_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
    "layer_types",
    "text_config",
    "tie_word_embeddings",
    "architectures",
    "dtype",
    "hidden_act",
    "attention_dropout",
)
VALUES: dict[str, str] = {
    "a million": "1000000",
    "2^62": str(1 << 62),
    "400 digits": "1" + "0" * 400,
    "negative": "-7",
    "NaN": "NaN",
    "endless": "1e999",
    "a text": '"x"',
    "a list": '[[1], "a", null]',
    "an object": '{"a": [1]}',
    "nested": "[" * 20_000 + "]" * 20_000,
}
TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CONTENTS: dict[str, bytes] = {
    "nested without end": b"[" * 200_000,
    "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "empty": b"",
    "a list": b"[]",
    "NUL": b"\0" * 4096,
}
SPARSE = 1 << 40
"""bytes that a file of holes claims"""


@dataclass(frozen=True)
class ModelKind:
    """One crafted model. gguf: the file is made; else the folder is changed."""

    name: str
    group: str
    change: Change
    gguf: bool = False


def put_value(file: str, field: str, value: str) -> Change:
    """A JSON file with the text of a value under a field."""

    def change(folder: Path) -> None:
        path = folder / file
        mapping = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        mapping.pop(field, None)
        body = json.dumps(mapping)[1:-1]
        path.write_text("{" + body + (", " if body else "") + f'"{field}": {value}' + "}", encoding="utf-8")

    return change


def put_content(file: str, data: bytes) -> Change:
    """A file with other bytes."""

    def change(folder: Path) -> None:
        (folder / file).write_bytes(data)

    return change


def put_pipe(file: str) -> Change:
    """A pipe nobody writes to, in place of a file."""

    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return change


def put_link(file: str, target: str) -> Change:
    """A link to a device that never ends, in place of a file."""

    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(target)

    return change


def put_holes(file: str, head: bytes = b"") -> Change:
    """A file that claims SPARSE bytes and holds `head`."""

    def change(folder: Path) -> None:
        (folder / file).write_bytes(head)
        os.truncate(folder / file, SPARSE)

    return change


def text(value: str) -> bytes:
    """A string as GGUF stores it."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    """A field as GGUF stores it."""
    return text(name) + struct.pack("<I", kind) + value


def header(*fields: bytes, tensors: int = 0, count: int | None = None, body: bytes = b"") -> bytes:
    """A GGUF file of a header alone."""
    n = len(fields) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, n) + b"".join(fields) + body


def array(inner: int, count: int, data: bytes = b"") -> bytes:
    """An array as GGUF stores it."""
    return struct.pack("<IQ", inner, count) + data


def gguf_headers() -> dict[str, bytes]:
    """Name -> bytes of a GGUF file."""
    kind = field("general.architecture", 8, text("llama"))
    number = [
        field(f"llama.{name}", 4, struct.pack("<I", value))
        for name, value in {
            "attention.head_count": 4,
            "embedding_length": 64,
            "block_count": 2,
            "feed_forward_length": 96,
            "context_length": 512,
        }.items()
    ]
    eps = field("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5))
    model = field("tokenizer.ggml.model", 8, text("llama"))
    scores = field("tokenizer.ggml.scores", 9, array(6, 2, struct.pack("<2f", 0, 0)))

    def tokens(*words: str) -> bytes:
        return field("tokenizer.ggml.tokens", 9, array(8, len(words), b"".join(map(text, words))))

    def block_count(value: int, form: str = "<I", code: int = 4) -> bytes:
        return field("llama.block_count", code, struct.pack(form, value))

    nested = b"".join(struct.pack("<IQ", 9, 1) for _ in range(10_000))
    return {
        "an array of 2^60 numbers": header(field("a", 9, array(4, 1 << 60))),
        "an array of 2^60 texts": header(field("a", 9, array(8, 1 << 60))),
        "an array of 2^60 arrays": header(field("a", 9, array(9, 1 << 60))),
        "arrays in arrays": header(field("a", 9, nested)),
        "a text of 2^60 bytes": header(text("a") + struct.pack("<IQ", 8, 1 << 60)),
        "a name of 2^60 bytes": header(struct.pack("<Q", 1 << 60)),
        "2^60 fields": header(kind, count=1 << 60),
        "2^60 tensors": header(kind, tensors=1 << 60),
        "a tensor of 2^31 dimensions": header(kind, tensors=1, body=text("t") + struct.pack("<I", 1 << 31)),
        "a tensor of 2^60 numbers": header(
            kind, tensors=1, body=text("t") + struct.pack("<IQQIQ", 2, 1 << 60, 1 << 60, 0, 0)
        ),
        "a tensor far away": header(kind, tensors=1, body=text("t") + struct.pack("<IQIQ", 1, 4, 0, 1 << 60)),
        "an unknown type": header(field("a", 99, b"\0" * 8)),
        "alignment 0": header(kind, field("general.alignment", 4, struct.pack("<I", 0))),
        "alignment a text": header(kind, field("general.alignment", 8, text("x"))),
        "architecture a number": header(field("general.architecture", 4, struct.pack("<I", 3))),
        "a million layers": header(kind, *number[:2], block_count(10**6), *number[3:], eps, model, tokens("a", "b")),
        "negative layers": header(kind, *number[:2], block_count(-5, "<i", 5), *number[3:], eps, model, tokens("a")),
        "KV heads a list": header(
            kind,
            *number,
            eps,
            model,
            tokens("a", "b"),
            field("llama.attention.head_count_kv", 9, array(4, 1, b"\1\0\0\0")),
        ),
        "tokens a number": header(kind, *number, eps, model, field("tokenizer.ggml.tokens", 4, b"\1\0\0\0")),
        "tokens of numbers": header(
            kind, *number, eps, model, field("tokenizer.ggml.tokens", 9, array(4, 1, b"\1\0\0\0"))
        ),
        "a token of a million letters": header(kind, *number, eps, model, scores, tokens("a" * 10**6, "b")),
        "scores a text": header(
            kind, *number, eps, model, tokens("a", "b"), field("tokenizer.ggml.scores", 8, text("x"))
        ),
        "RoPE base a text": header(
            kind, *number, eps, model, scores, tokens("a", "b"), field("llama.rope.freq_base", 8, text("x"))
        ),
        "epsilon a text": header(
            kind,
            *number,
            field("llama.attention.layer_norm_rms_epsilon", 8, text("x")),
            model,
            scores,
            tokens("a", "b"),
        ),
        "unknown token 2^31": header(
            kind,
            *number,
            eps,
            model,
            scores,
            tokens("a", "b"),
            field("tokenizer.ggml.unknown_token_id", 4, b"\xff" * 4),
        ),
        "no tensor at all": header(kind, *number, eps, model, scores, tokens("a", "b")),
        "empty": b"",
        "the magic alone": b"GGUF",
    }


def kinds() -> Iterator[ModelKind]:
    """Every crafted model."""
    for name in (*SIZES, *OTHER):
        for words, value in VALUES.items():
            yield ModelKind(f"config {name}: {words}", "config", put_value("config.json", name, value))
    for words, value in VALUES.items():
        for name in ("eos_token_id", "repetition_penalty", "suppress_tokens", "max_new_tokens"):
            change = put_value("generation_config.json", name, value)
            yield ModelKind(f"generation config {name}: {words}", "generation config", change)
        for name in ("chat_template", "bos_token", "model_max_length", "added_tokens_decoder"):
            change = put_value("tokenizer_config.json", name, value)
            yield ModelKind(f"tokenizer config {name}: {words}", "tokenizer config", change)
        for name in ("model", "added_tokens", "pre_tokenizer", "normalizer"):
            yield ModelKind(f"tokenizer {name}: {words}", "tokenizer", put_value("tokenizer.json", name, value))
    for file in TEXTS:
        for words, data in CONTENTS.items():
            yield ModelKind(f"{file}: {words}", "content", put_content(file, data))
    for file in (*TEXTS, "model.safetensors", "special_tokens_map.json", "model.safetensors.index.json"):
        yield ModelKind(f"{file}: a pipe", "pipe", put_pipe(file))
        yield ModelKind(f"{file}: a device", "device", put_link(file, "/dev/zero"))
        yield ModelKind(f"{file}: holes of 2^40 bytes", "holes", put_holes(file))
    huge = struct.pack("<Q", 1 << 60)
    yield ModelKind(
        "model.safetensors: a header of 2^60 bytes", "weights", put_content("model.safetensors", huge + b"{}")
    )
    for words, data in gguf_headers().items():
        yield ModelKind(f"GGUF: {words}", "GGUF", put_content("model.gguf", data), gguf=True)
        if words not in ("empty", "the magic alone"):
            yield ModelKind(f"GGUF: {words}, holes behind", "GGUF holes", put_holes("model.gguf", data), gguf=True)
    for file in ("model.gguf",):
        yield ModelKind(f"{file}: a pipe", "pipe", put_pipe(file), gguf=True)
        yield ModelKind(f"{file}: a device", "device", put_link(file, "/dev/zero"), gguf=True)


def write_whole(folder: Path) -> None:
    """Write a random Llama with a tokenizer of words, as a folder that loads."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
