"""Two runs side by side: may they be compared step by step, where do they part, and what is set differently in them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvlens.store.reader import TraceReader

#: What is compared of the configuration, in this order; the method's own parameters follow.
SETTINGS = (
    "model",
    "model_fingerprint",
    "method",
    "preset",
    "budget",
    "budget_bytes",
    "device",
    "dtype",
    "seed",
    "temperature",
    "top_p",
    "max_new",
    "task",
    "forced",
    "parent",
    "coverage",
    "oracle",
    "trace_level",
    "kvlens",
    "torch",
    "transformers",
    "kernels",
    "link",
    "machine",
    "started",
)
KINDS = ("differs", "one method only", "same")
ABSENT = "–"
"""what a setting that a run does not have is shown as"""


@dataclass(frozen=True)
class Pair:
    """Runs A and B. Differences are B minus A."""

    a: TraceReader
    b: TraceReader
    apart: str | None
    """the sentence why only totals can be compared; None: the prompts are the same, token by token"""
    divergence: int | None
    """the first step at which other tokens were chosen; None: there is none, or `apart`"""

    @classmethod
    def of(cls, a: TraceReader, b: TraceReader) -> Pair:
        """Reads both runs' tokens once."""
        first, second = a.tokens(), b.tokens()
        apart = why_apart(a, b, first, second)
        return cls(a, b, apart, None if apart else divergence(first, second))

    @property
    def steps(self) -> int:
        """Steps of the longer run."""
        return max(self.a.n_steps, self.b.n_steps)

    @property
    def same_shape(self) -> bool:
        """The models have the same layers and heads, so their maps can be laid over each other."""
        return (self.a.n_layers, self.a.q_heads, self.a.kv_heads) == (self.b.n_layers, self.b.q_heads, self.b.kv_heads)

    def same_context(self, step: int) -> bool:
        """At this step both runs had read and generated the same tokens."""
        return self.apart is None and (self.divergence is None or step <= self.divergence)


def why_apart(a: TraceReader, b: TraceReader, first: pd.DataFrame, second: pd.DataFrame) -> str | None:
    """None when both runs read the same tokens; else the sentence why their steps and positions do not correspond."""
    prompts = [
        tokens.loc[tokens["step"].isna(), ["token_id", "text"]].reset_index(drop=True) for tokens in (first, second)
    ]
    if prompts[0].equals(prompts[1]):
        return None
    text = a.prompt_text()
    if text and text == b.prompt_text():
        return (
            "The two runs read the same text cut into other tokens, by another tokenizer: steps and positions "
            "do not correspond, "
            "so only their totals are compared."
        )
    return (
        "The two runs read different prompts: steps and positions do not correspond, so only their totals are compared."
    )


def divergence(first: pd.DataFrame, second: pd.DataFrame) -> int | None:
    """The first step at which two runs of one prompt chose other tokens, over the steps that both have."""
    ids = [
        tokens.loc[tokens["step"].notna()].sort_values("step")["token_id"].to_numpy(np.int64)
        for tokens in (first, second)
    ]
    both = min(map(len, ids))
    different = np.flatnonzero(ids[0][:both] != ids[1][:both])
    return int(different[0]) if different.size else None


def divergence_words(pair: Pair) -> str:
    """Where the runs part, and which of them was fed another's tokens."""
    fed = [
        f"{name} was fed {whose} tokens (forced decoding)"
        for name, run, other, its in (("A", pair.a, pair.b, "B's"), ("B", pair.b, pair.a, "A's"))
        if run.meta.forced
        for whose in [its if run.meta.reference == other.uid else "its reference's"]
    ]
    said = f"{' and '.join(fed)}. " if fed else ""
    if pair.divergence is None:
        end = (
            ""
            if pair.a.n_steps == pair.b.n_steps
            else f" as far as both go (A has {pair.a.n_steps} steps, B {pair.b.n_steps})"
        )
        return f"{said}The tokens are the same at every step{end}, so all these steps have the same context."
    step = pair.divergence
    chosen = [repr(_token(run, step)) for run in (pair.a, pair.b)]
    return (
        f"{said}First divergence at step {step}: A chose {chosen[0]}, B {chosen[1]}. Up to this step the "
        f"contexts are the same; "
        "everything after it was computed in different contexts."
    )


def _token(reader: TraceReader, step: int) -> str:
    tokens = reader.tokens()
    return str(tokens.loc[tokens["step"] == step, "text"].iloc[0])


def settings(reader: TraceReader) -> dict[str, Any]:
    """A run's settings by name; the method's parameters are called 'parameter NAME'."""
    meta = reader.meta
    found = {name: value for name, value in meta.pick(SETTINGS).items() if value is not None}
    found |= {"held ranges": [held.stored() for held in meta.hold]} if meta.hold else {}
    return found | {f"parameter {name}": value for name, value in _flat(meta.config).items()}


def config_difference(a: TraceReader, b: TraceReader) -> pd.DataFrame:
    """Every setting of either run as text: setting, A, B, kind. In this order of kinds: 'differs', 'one method only' (a
    parameter that the other run's method does not have), 'same'."""
    first, second = settings(a), settings(b)
    rows = [
        {"setting": name, "A": _text(first.get(name)), "B": _text(second.get(name)), "kind": _kind(name, first, second)}
        for name in dict.fromkeys([*first, *second])
    ]
    frame = pd.DataFrame(rows, columns=["setting", "A", "B", "kind"])
    return frame.sort_values("kind", key=lambda kinds: kinds.map(KINDS.index), kind="stable", ignore_index=True)


def _kind(name: str, first: dict[str, Any], second: dict[str, Any]) -> str:
    if name.startswith("parameter ") and (name in first) != (name in second):
        return "one method only"
    return "same" if first.get(name) == second.get(name) else "differs"


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _text(value: Any) -> str:
    if value is None:
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def run_name(reader: TraceReader) -> str:
    """A run in a few words: method, preset, budget, forced, held."""
    meta = reader.meta
    parts = [str(meta.method)]
    parts += [f"({meta.preset})"] if meta.preset else []
    parts += ["without limit" if meta.budget_bytes is None else f"budget {meta.budget}"]
    parts += ["forced"] if meta.forced else []
    parts += ["with held ranges"] if meta.hold else []
    return " ".join(parts)
