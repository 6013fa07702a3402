"""How CHESS's paper measures quality: setting -> what its text says, with the section."""

from __future__ import annotations

from kvlens.studies.protocols import NOT_STATED

PROTOCOL = {
    "model": NOT_STATED,
    "prompt form": NOT_STATED,
    "truncation": NOT_STATED,
    "scoring": "LongBench v2: overall, by difficulty and by length (5.2, Table 1)",
    "decoding": NOT_STATED,
    "number format of KV": NOT_STATED,
    "budget": "ratios of grids, chunks and pages, down to 1% of the KV cache (5.1, 5.2)",
}
