"""How FreeKV's paper measures quality: setting -> what its text says, with the section."""

from __future__ import annotations

from kvlens.studies.protocols import NOT_STATED

PROTOCOL = {
    "model": "Llama-3.1-8B-Instruct, Qwen-2.5-7B-Instruct, Qwen-2.5-14B-Instruct; DeepSeek-R1-Llama-8B, "
    "-Qwen-7B and -Qwen-14B for reasoning (5.1)",
    "prompt form": NOT_STATED,
    "truncation": "LongBench v2: inputs cut to 64K tokens; where, is not stated (5.2)",
    "scoring": "LongBench v2: accuracy of multiple choice; LongGenBench: completion rate times accuracy, by "
    "Qwen-3-32B; MATH500, AIME24, GPQA: pass@8 and avg@8 (5.2)",
    "decoding": "LongBench v2: greedy; LongGenBench: temperature 0.95, top-p 0.95; reasoning: temperature 0.6, "
    "top-p 0.95 (Appendix A)",
    "number format of KV": NOT_STATED,
    "budget": "2048 tokens (5.1)",
}
