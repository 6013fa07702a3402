"""Any number of runs beside one of them: which can be laid beside it step by step, and as far as where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvlens.app.compare.pair import divergence, reads_otherwise, shape
from kvlens.store.reader import TraceReader

_WHY = {
    "prompt": "read another prompt, so steps do not correspond",
    "tokens": "read the same text cut into other tokens, so steps do not correspond",
    "shape": "ran on a model with other layers or heads, so maps do not correspond",
}


@dataclass(frozen=True)
class Together:
    """Runs of one prompt and one shape, by name, and what was left out."""

    names: tuple[str, ...]
    same: int
    """at the steps [0, same) all of them had read and generated the same tokens"""
    both: int
    """all of them have the steps [0, both)"""
    left_out: tuple[str, ...]
    """a sentence for each reason why others are not among them"""

    @classmethod
    def beside(cls, name: str, every: Mapping[str, TraceReader]) -> Together:
        """The runs among `every` that can be laid beside the one called `name`, which is one of them. Reads all
        tokens."""
        chosen_run, first_tokens = every[name], every[name].tokens()
        inside, out = [], dict[str, list[str]]()
        same = both = chosen_run.n_steps
        for other_name, reader in every.items():
            tokens = first_tokens if other_name == name else reader.tokens()
            why = reads_otherwise(chosen_run, reader, first_tokens, tokens)
            if why is None and shape(reader) != shape(chosen_run):
                why = "shape"
            if why is not None:
                out.setdefault(why, []).append(other_name)
                continue
            inside.append(other_name)
            parted = divergence(first_tokens, tokens)
            both = min(both, reader.n_steps)
            same = min(same, both if parted is None else parted + 1)
        sentences = tuple(f"{joined(names)} {_WHY[why]} with those of {name}." for why, names in out.items())
        return cls(tuple(inside), same, both, sentences)


def joined(names: list[str]) -> str:
    """'A', 'A and B', 'A, B and C'."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def steps_named(stop: int) -> str:
    """'steps 0–3', 'step 0': the steps [0, stop)."""
    return f"steps 0–{stop - 1}" if stop > 1 else "step 0"
