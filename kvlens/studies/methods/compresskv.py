"""How CompressKV's paper measures quality: setting -> what its text says, with the section."""

from __future__ import annotations

from kvlens.studies.protocols import NOT_STATED

PROTOCOL = {
    "model": "Llama-3.1-8B-Instruct, Mistral-7B-Instruct-v0.3, Qwen2.5-14B-Instruct, Qwen2.5-32B-Instruct (4, "
    "Baselines and Models)",
    "decoding": "greedy (4, Baselines and Models)",
    "number format of KV": NOT_STATED,
    "budget": "128 to 2048 tokens per layer in the mean (4, Implementation Details)",
}
