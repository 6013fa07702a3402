"""How SentKVCompress's paper measures quality: setting -> what its text says, with the section."""

from __future__ import annotations

from kvlens.studies.protocols import NOT_STATED

PROTOCOL = {
    "model": "Mistral-7B-inst-v0.2, Longchat-32K, DeepSeek-R1-Distill-Llama-8B (5.1.2)",
    "prompt form": NOT_STATED,
    "truncation": NOT_STATED,
    "scoring": "LongBench, English datasets: F1 (5.1.1)",
    "decoding": NOT_STATED,
    "number format of KV": NOT_STATED,
    "budget": "a usage rate: original K and V elements that move, over all (2); 0.1 on DeepSeek-R1 (5.1.2)",
}
