"""A method beside a press of kvpress, and the sizes of all cases (benchmarks/oracle.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

N, WINDOW, KERNEL, KEPT, CHUNK, BLOCK, SINKS = 203, 11, 5, 59, 16, 16, 4
"""prompt tokens, a multiple of nothing; lengths of the cases, in tokens"""
CONFIG = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def removing(kept_count: int, tokens: int) -> float:
    """The share to remove that leaves so many."""
    return 1 - (kept_count + 0.5) / tokens


def snap(kept_count: int = KEPT, kernel: int = KERNEL) -> list[Any]:
    fields = {"window_size": WINDOW, "kernel_size": kernel, "compression_ratio": removing(kept_count, N)}
    return ["SnapKVPress", fields]


def plain(name: str, kept_count: int = KEPT, **fields: Any) -> list[Any]:
    """Of a press that ranks the prompt without its last token, as methods do that do not peek."""
    return [name, {"compression_ratio": removing(kept_count, N - 1), **fields}]


def exactly(kept_count: int) -> float:
    """The share to remove that leaves so many tokens of each KV head on average, of all pairs together."""
    return 1 - (kept_count - 0.05) / (N - 1)


@dataclass(frozen=True)
class Case:
    """A method beside a press."""

    name: str
    method: str
    params: dict[str, Any]
    press: list[list[Any]]
    peeks: bool = False
    """the method counts the prompt's last token; else both leave it out"""
    times: float = 1.0
    """what the press's scores are multiplied by, where it means what the method adds up"""
    layers: int | None = None
    """compared are the first so many; None: all"""
    counts: bool = False
    """every layer keeps as many tokens as the press keeps"""
    chunk: int = 0
    """scores are compared as means over chunks and sums over KV heads"""
    expected: str = "equal"
    """what stays: equal, or differs"""
    why: str = ""
