"""How the papers of methods measure quality: prompt form, truncation, scoring, model, decoding, budget, number format.
Every entry is from a paper's text and names the section; NOT_STATED where the text says nothing. A method's own entries
are in its part `protocol`."""

from __future__ import annotations

from collections.abc import Mapping

from kvlens.methods.naming import installed
from kvlens.methods.parts import part

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


def protocol_of(method: str, benchmark: str) -> dict[str, str]:
    """Return setting -> what the method's paper does, as far as its text or its benchmark's says: the method's part
    `protocol` (kvlens.methods.parts)."""
    of_benchmark = {name: f"{benchmark}: {text}" for name, text in BENCHMARKS.get(benchmark, {}).items()}
    kind = installed(method)
    of_paper = {} if kind is None else getattr(part(kind, "protocol", "kvlens.studies.methods"), "PROTOCOL", {})
    return {**of_benchmark, **of_paper}
