"""What `make oracle` lays side by side: methods and the presses of kvpress that say the same (benchmarks/oracle.py)."""

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


LAG, LAG_PARTS = 16, 11
LAG_TAIL = N - 1 - SINKS - LAG * LAG_PARTS
"""tokens of a partition, partitions that have a next one, and tokens behind these"""
REPEATED, RECENT, LAZY, CUT = 64, 33, 0.3, 0.0
"""tokens of KVzip's chunks; newest tokens of a lazy layer; thresholds of laziness and of KeyDiff's score"""
OBSERVED = {"window": WINDOW, "kernel": KERNEL, "pool": "avg", "tokens": KEPT}
CASES = (
    Case("snapkv", "snapkv", OBSERVED, [snap()], peeks=True, times=WINDOW),
    Case(
        "pyramidkv",
        "pyramidkv",
        {**OBSERVED, "beta": 4.0},
        [["PyramidKVPress", {**snap()[1], "beta": 4}]],
        peeks=True,
        times=WINDOW,
        counts=True,
        why="cut to kvpress's own layer budgets, which count the window inside the pyramid and round each layer",
    ),
    Case(
        "adakv",
        "adakv",
        {**OBSERVED, "floor": 0.0},
        [["AdaKVPress", {"alpha_safeguard": 0.0}], snap()],
        peeks=True,
        times=WINDOW,
    ),
    Case(
        "adakv_floor",
        "adakv",
        {**OBSERVED, "floor": 0.2},
        [["AdaKVPress", {"alpha_safeguard": 0.2}], snap()],
        peeks=True,
        times=WINDOW,
        expected="differs",
        why="the floor is an equal share mixed into each head's count, as in the paper; kvpress keeps each head's best "
        "tokens, window first, before it ranks all heads together",
    ),
    Case(
        "chunkkv",
        "chunkkv",
        {"window": WINDOW, "page": CHUNK, "reuse": 1, "tokens": WINDOW + 2 * CHUNK},
        [["ChunkKVPress", {"chunk_length": CHUNK}], snap(kernel=1)],
        peeks=True,
        times=WINDOW * 3,
        chunk=CHUNK,
        why="where the window begins with a chunk: kvpress cuts the whole prompt into chunks and scores the window's "
        "highest, so that a chunk the window begins inside stays whole",
    ),
    Case("keydiff", "keydiff", {"tokens": KEPT}, [plain("KeyDiffPress")]),
    Case(
        "keydiff_blocks",
        "keydiff",
        {"tokens": 3 * BLOCK, "block": BLOCK},
        [["BlockPress", {"block_size": BLOCK}], plain("KeyDiffPress", 3 * BLOCK)],
        layers=1,
        why="kvpress ranks in blocks what a full prefill has made; beyond the first layer blocks that attend only what "
        "was kept, as in the paper, have other keys. No scores: those of the last block are not kept there",
    ),
    Case(
        "tova",
        "tova",
        {"tokens": KEPT + 1, "recent": 2},
        [plain("TOVAPress")],
        why="with the prompt's newest token kept whatever it scores, as kvpress has it and the paper does not",
    ),
    Case(
        "expected_attention",
        "expected_attention",
        {"sinks": SINKS, "future": 512, "epsilon": 0.02, "tokens": KEPT},
        [plain("ExpectedAttentionPress", n_sink=SINKS, n_future_positions=512, epsilon=0.02)],
    ),
    Case(
        "lagkv",
        "lagkv",
        {"sinks": SINKS, "lag": LAG, "tokens": SINKS + LAG_TAIL + LAG_PARTS * 7},
        [plain("LagKVPress", SINKS + LAG_TAIL + LAG_PARTS * 7, n_sink=SINKS, lag_size=LAG)],
        why="with as many tokens as all partitions can keep equally many of: else kvpress breaks ties anyhow",
    ),
    Case(
        "critical",
        "critical:keydiff",
        {"tokens": KEPT},
        [["CriticalKVPress", {}], plain("KeyDiffPress")],
        why="kvpress's scores are those of its second stage, where the first has the largest number there is",
    ),
    Case(
        "adakv_keydiff",
        "adakv:keydiff",
        {"tokens": KEPT, "floor": 0.0},
        [["AdaKVPress", {"alpha_safeguard": 0.0}], plain("KeyDiffPress")],
    ),
    Case("curdkv", "curdkv", {"tokens": KEPT}, [plain("CURPress")]),
    Case("curdkv_keys", "curdkv", {"tokens": KEPT, "leverage": "key"}, [plain("CURPress", leverage_type="key")]),
    Case(
        "compactor",
        "compactor",
        {"tokens": KEPT, "blend": 0.0, "chunk": 38},
        [plain("CompactorPress", blending=0.0, chunk_size=38)],
        why="the attention alone, in chunks that divide the prompt: kvpress draws its sketch from a random state that "
        "kvlens does not share, and gives the last chunk's padding a weight",
    ),
    Case(
        "streaming_llm",
        "streaming_llm",
        {"sinks": SINKS, "tokens": KEPT + 1, "positions": "cache"},
        [["KeyRerotationPress", {}], plain("StreamingLLMPress", n_sink=SINKS)],
        why="re-rotated keys are compared in the first layer: beyond it keys differ, since kvpress has read the prompt "
        "under full attention; it is no ranking, so that there are no scores",
    ),
    Case(
        "kvzip",
        "kvzip",
        {"sinks": SINKS, "tokens": KEPT},
        [["KVzipPress", {"compression_ratio": exactly(KEPT), "n_sink": SINKS}]],
        why="both read instructions as one token a byte, and a line break as the end of the user's turn",
    ),
    Case(
        "kvzip_chunks",
        "kvzip",
        {"sinks": SINKS, "tokens": KEPT, "chunk": REPEATED},
        [["KVzipPress", {"compression_ratio": exactly(KEPT), "n_sink": SINKS, "chunk_size": REPEATED}]],
        why="in four chunks, the last one shorter",
    ),
    Case(
        "kvzip_layers",
        "kvzip",
        {"sinks": SINKS, "tokens": KEPT, "share": "layer"},
        [["KVzipPress", {"compression_ratio": exactly(KEPT), "n_sink": SINKS, "layerwise": True}]],
    ),
    Case(
        "finch",
        "finch",
        {"window": WINDOW, "tokens": KEPT, "chunk": N},
        [plain("FinchPress")],
        why="the question is the last tokens. Kvpress multiplies by one token less than a query sees. Keys are "
        "compared in the first layer, moved together; no scores, since the method ranks within chunks",
    ),
    Case(
        "finch_in_place",
        "finch",
        {"window": WINDOW, "tokens": KEPT, "chunk": N, "closed": False, "normalised": False},
        [plain("FinchPress", normalize_scores=False, rerotate_keys=False)],
    ),
    Case(
        "finch_chunks",
        "finch",
        {"window": WINDOW, "tokens": 58, "chunk": 101, "closed": False},
        [plain("FinchPress", chunk_length=101, rerotate_keys=False)],
        expected="differs",
        why="the question is the last tokens; kvpress counts it among the tokens that the last chunk keeps, the method "
        "keeps it beside an equal share of every chunk, as the paper has it",
    ),
    Case(
        "thinkkv",
        "thinkkv",
        {"pruned": 0.4, "window": WINDOW},
        [["ThinKPress", {"key_channel_compression_ratio": 0.4, "window_size": WINDOW}]],
        why="compared are the channels of keys that stay; kvpress prunes the newest keys too",
    ),
    Case(
        "simlayerkv",
        "simlayerkv",
        {"window": RECENT, "sinks": SINKS, "tokens": (N + RECENT + SINKS) // 2},
        [["SimLayerKVPress", {"lazy_threshold": LAZY, "n_recent": RECENT + 1, "n_initial": SINKS}]],
        peeks=True,
        why="a budget with which two of the four layers are lazy, and a threshold of kvpress between them",
    ),
    Case(
        "scorecut",
        "scorecut:keydiff",
        {"window": WINDOW, "scale": "score", "cut": CUT},
        [["DMSPress", {"threshold": CUT, "sliding_window_size": WINDOW}], ["KeyDiffPress", {}]],
        why="kvpress's DMSPress, which has no trained decisions either",
    ),
    Case(
        "qfilters",
        "qfilters",
        {"filters": "drawn", "window": 0, "tokens": KEPT},
        [plain("QFilterPress")],
        why="the same drawn filters, since kvpress downloads its own",
    ),
)
INSIDE = tuple(
    Case(name, f"kvpress:{name}", {"tokens": KEPT, **fields}, [plain(name, **fields)])
    for name, fields in (
        ("KnormPress", {}),
        ("KeyDiffPress", {}),
        ("SnapKVPress", {"window_size": WINDOW}),
        ("ExpectedAttentionPress", {"n_sink": SINKS}),
        ("TOVAPress", {}),
    )
)
"""presses that kvlens runs itself"""
UNRANKED = (
    "keydiff_blocks",
    "streaming_llm",
    "critical",
    "finch",
    "finch_in_place",
    "finch_chunks",
    "thinkkv",
    "simlayerkv",
)
"""cases whose press ranks nothing that is left to be compared"""
