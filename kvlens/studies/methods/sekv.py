"""How SeKV's paper measures quality: setting -> what its text says, with the section."""

from __future__ import annotations

PROTOCOL = {
    "model": "Llama-3.2-3B-Instruct, Llama-3-8B, Llama-3.1-8B-Instruct, Mistral-7B-Instruct-v0.3, "
    "Qwen2.5-14B-Instruct (4.1)",
    "prompt form": "each benchmark's official protocol (4.1)",
    "truncation": "none named; longer contexts use the model's long-context configuration (4.1)",
    "scoring": "F1 on LongBench's QA subsets; accuracy on RULER, InfiniteBench Retrieve and NIAH; exact match on "
    "GSM8K (4.1). Appendix B: LongBench's official average",
    "decoding": "the same for all methods; which, is not stated (4.1)",
    "number format of KV": "not stated; the projections are trained in bf16 (4.1)",
    "budget": "10% of full KV on the GPU; 5, 15 and 20% in ablations (4.1)",
}
