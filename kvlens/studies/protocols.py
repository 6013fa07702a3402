"""How the papers of methods measure quality: prompt form, truncation, scoring, model, decoding, budget, number format.
Every entry is from the paper's text and names the section; NOT_STATED where the text says nothing."""

from __future__ import annotations

from collections.abc import Mapping

NOT_STATED = "not stated"
SETTINGS = ("model", "prompt form", "truncation", "scoring", "decoding", "number format of KV", "budget")
"""what is compared besides parameters and the place of the question"""

BENCHMARKS: Mapping[str, Mapping[str, str]] = {
    "LongBench": {
        "prompt form": "the task's template, in the model's chat form but for few-shot and code tasks",
        "truncation": "context cut in its middle to the model's length",
        "scoring": "F1, ROUGE-L, accuracy or edit similarity, by task",
    }
}
"""Method.benchmark -> what it does. LongBench: Bai et al. 2024, and its script pred.py, which the lab's task follows"""

PAPERS: Mapping[str, Mapping[str, str]] = {
    "sekv": {
        "model": "Llama-3.2-3B-Instruct, Llama-3-8B, Llama-3.1-8B-Instruct, Mistral-7B-Instruct-v0.3, "
        "Qwen2.5-14B-Instruct (4.1)",
        "prompt form": "each benchmark's official protocol (4.1)",
        "truncation": "none named; longer contexts use the model's long-context configuration (4.1)",
        "scoring": "F1 on LongBench's QA subsets; accuracy on RULER, InfiniteBench Retrieve and NIAH; exact match on "
        "GSM8K (4.1). Appendix B: LongBench's official average",
        "decoding": "the same for all methods; which, is not stated (4.1)",
        "number format of KV": "not stated; the projections are trained in bf16 (4.1)",
        "budget": "10% of full KV on the GPU; 5, 15 and 20% in ablations (4.1)",
    },
    "chess": {
        "model": NOT_STATED,
        "prompt form": NOT_STATED,
        "truncation": NOT_STATED,
        "scoring": "LongBench v2: overall, by difficulty and by length (5.2, Table 1)",
        "decoding": NOT_STATED,
        "number format of KV": NOT_STATED,
        "budget": "ratios of grids, chunks and pages, down to 1% of the KV cache (5.1, 5.2)",
    },
    "freekv": {
        "model": "Llama-3.1-8B-Instruct, Qwen-2.5-7B-Instruct, Qwen-2.5-14B-Instruct; DeepSeek-R1-Llama-8B, -Qwen-7B "
        "and -Qwen-14B for reasoning (5.1)",
        "prompt form": NOT_STATED,
        "truncation": "LongBench v2: inputs cut to 64K tokens; where, is not stated (5.2)",
        "scoring": "LongBench v2: accuracy of multiple choice; LongGenBench: completion rate times accuracy, by "
        "Qwen-3-32B; MATH500, AIME24, GPQA: pass@8 and avg@8 (5.2)",
        "decoding": "LongBench v2: greedy; LongGenBench: temperature 0.95, top-p 0.95; reasoning: temperature 0.6, "
        "top-p 0.95 (Appendix A)",
        "number format of KV": NOT_STATED,
        "budget": "2048 tokens (5.1)",
    },
    "sentkv": {
        "model": "Mistral-7B-inst-v0.2, Longchat-32K, DeepSeek-R1-Distill-Llama-8B (5.1.2)",
        "prompt form": NOT_STATED,
        "truncation": NOT_STATED,
        "scoring": "LongBench, English datasets: F1 (5.1.1)",
        "decoding": NOT_STATED,
        "number format of KV": NOT_STATED,
        "budget": "a usage rate: original K and V elements that move, over all (2); 0.1 on DeepSeek-R1 (5.1.2)",
    },
    "compresskv": {
        "model": "Llama-3.1-8B-Instruct, Mistral-7B-Instruct-v0.3, Qwen2.5-14B-Instruct, Qwen2.5-32B-Instruct (4, "
        "Baselines and Models)",
        "decoding": "greedy (4, Baselines and Models)",
        "number format of KV": NOT_STATED,
        "budget": "128 to 2048 tokens per layer in the mean (4, Implementation Details)",
    },
}
"""method -> setting -> what the paper says, with its section. Settings that are missing are the benchmark's"""


def protocol_of(method: str, benchmark: str) -> dict[str, str]:
    """Return setting -> what the method's paper does, as far as its text or its benchmark's says."""
    of_benchmark = {name: f"{benchmark}: {text}" for name, text in BENCHMARKS.get(benchmark, {}).items()}
    return {**of_benchmark, **PAPERS.get(method, {})}
