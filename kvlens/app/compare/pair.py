"""Two runs side by side: may they be compared step by step, and where do they part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvlens.store.reader import TraceReader

APART = {
    "tokens": "Another tokenizer cut the text of the second run. Steps and positions do not correspond, so only totals "
    "are compared.",
    "prompt": "The two runs read different prompts. Steps and positions do not correspond, so only totals are "
    "compared.",
}
"""what `reads_otherwise` finds -> what it means for a comparison"""


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
    def read(cls, a: TraceReader, b: TraceReader) -> Pair:
        """Reads both runs' tokens once."""
        first_tokens, second = a.tokens(), b.tokens()
        apart = reads_otherwise(a, b, first_tokens, second)
        return cls(a, b, APART[apart], None) if apart else cls(a, b, None, divergence(first_tokens, second))

    @property
    def steps(self) -> int:
        """Steps of the longer run."""
        return max(self.a.n_steps, self.b.n_steps)

    @property
    def same_shape(self) -> bool:
        """The models have the same layers and heads, so their maps can be laid over each other."""
        return shape(self.a) == shape(self.b)


def shape(reader: TraceReader) -> tuple[int, int, int]:
    """Layers, query heads, KV heads of the run's model."""
    return reader.n_layers, reader.q_heads, reader.kv_heads


def reads_otherwise(a: TraceReader, b: TraceReader, first_tokens: pd.DataFrame, second: pd.DataFrame) -> str | None:
    """Whether two runs, whose tokens are given, read different prompts: 'tokens' (the same text, cut otherwise),
    'prompt', or None."""
    prompts = [
        tokens.loc[tokens["step"].isna(), ["token_id", "text"]].reset_index(drop=True)
        for tokens in (first_tokens, second)
    ]
    if prompts[0].equals(prompts[1]):
        return None
    text = a.prompt_text()
    return "tokens" if text and text == b.prompt_text() else "prompt"


def divergence(first_tokens: pd.DataFrame, second: pd.DataFrame) -> int | None:
    """The first step at which two runs of one prompt chose other tokens, over the steps that both have."""
    ids = [
        tokens.loc[tokens["step"].notna()].sort_values("step")["token_id"].to_numpy(np.int64)
        for tokens in (first_tokens, second)
    ]
    both = min(map(len, ids))
    different = np.flatnonzero(ids[0][:both] != ids[1][:both])
    return int(different[0]) if different.size else None


def divergence_words(pair: Pair) -> str:
    """Where the runs part, and which of them was fed another's tokens."""
    fed = [
        f"{name} was fed {owner} tokens (forced decoding)"
        for name, run, other_run, its in (("A", pair.a, pair.b, "B's"), ("B", pair.b, pair.a, "A's"))
        if run.meta.forced
        for owner in [its if run.meta.reference == other_run.uid else "its reference's"]
    ]
    sentence = f"{' and '.join(fed)}. " if fed else ""
    if pair.divergence is None:
        end = (
            ""
            if pair.a.n_steps == pair.b.n_steps
            else f" as far as both go (A has {pair.a.n_steps} steps, B {pair.b.n_steps})"
        )
        return f"{sentence}The tokens are the same at every step{end}, so all these steps have the same context."
    step = pair.divergence
    tokens = [repr(_token(run, step)) for run in (pair.a, pair.b)]
    return (
        f"{sentence}First divergence at step {step}: A chose {tokens[0]}, B {tokens[1]}. Up to this step the "
        f"contexts are the same; "
        "everything after it was computed in different contexts."
    )


def _token(reader: TraceReader, step: int) -> str:
    tokens = reader.tokens()
    return str(tokens.loc[tokens["step"] == step, "text"].iloc[0])
