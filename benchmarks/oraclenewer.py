"""Cases of `make oracle`: KVzip, FINCH, ThinK, SimLayerKV, the score cut, Q-Filters (benchmarks/oracle.py)."""

from __future__ import annotations

from benchmarks.oracleforms import KEPT, SINKS, WINDOW, Case, N, exactly, plain

REPEATED, RECENT, LAZY, CUT = 64, 33, 0.3, 0.0
"""tokens of KVzip's chunks; newest tokens of a lazy layer; thresholds of laziness and of KeyDiff's score"""
NEWER_CASES = (
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
        "keeps it beside an equal share of every chunk",
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
