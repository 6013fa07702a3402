"""What `make oracle` lays side by side: methods and the presses of kvpress that say the same (benchmarks/oracle.py)."""

from __future__ import annotations

from benchmarks.oracleforms import BLOCK, CHUNK, KEPT, KERNEL, SINKS, WINDOW, Case, N, plain, snap
from benchmarks.oraclenewer import NEWER_CASES

LAG, LAG_PARTS = 16, 11
LAG_TAIL = N - 1 - SINKS - LAG * LAG_PARTS
"""tokens of a partition, partitions that have a next one, and tokens behind these"""
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
        why="with as many tokens as all partitions can keep equally many of: otherwise kvpress breaks ties "
        "in no fixed order",
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
    *NEWER_CASES,
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
