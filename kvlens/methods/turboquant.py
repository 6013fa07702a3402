"""TurboQuant: every token stays, turned by a random rotation and rounded number by number to fixed levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlens.finer import parse_finer
from kvlens.methods.families.few_bits import FewBits, refuses_few_bits
from kvlens.methods.families.packed_tokens import PackedTokens
from kvlens.methods.fitting import clamp
from kvlens.methods.parameters import finer_param, param
from kvlens.methods.wrappers import Lending, Lent
from kvlens.quantised.form import ROTATED, Quantised
from kvlens.shape import KVShape

SEED = 0
"""of the rotation and the projection: the same in every run, as the paper's are drawn once"""


@dataclass(frozen=True)
class TurboQuantParameters:
    """Lengths are in tokens."""

    key_bits: int = param(
        4, "bits of a number of a key, the correction's included", symbol="b", choices=(2, 3, 4), ours=True
    )
    value_bits: int = param(4, "bits of a number of a value", symbol="b", choices=(1, 2, 3, 4), ours=True)
    corrected: bool = param(
        True,
        "one bit of a key's numbers is the sign of the remainder under a second projection",
        symbol="QJL",
        ours=True,
    )
    group: int = param(32, "tokens of a span, which errors are logged for", ours=True)
    residual: int = param(32, "newest tokens in full precision, a multiple of the group", ours=True)
    finer: str = finer_param()

    def __post_init__(self) -> None:
        parse_finer(self.finer)
        if self.group < 1:
            raise ValueError("group must be at least 1.")
        if self.residual < 1 or self.residual % self.group:
            raise ValueError(f"residual must be a multiple of the group, {self.group}.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """Four bits where the budget is at least 35 % of full KV or has no limit, three at 28 %, two below; the newest
        tokens that stay exact are a 32nd of the prompt in groups of 8, 32 at most (ours: the paper keeps none). Bits
        count as shares of 16; at 32 bits a number they take half of it."""
        share = 1.0 if budget_bytes is None else budget_bytes / shape.full_kv_bytes(prompt_tokens + 1 + max_new)
        bits = 4 if share >= 0.35 else 3 if share >= 0.28 else 2
        return {"key_bits": bits, "value_bits": bits, "group": 8, "residual": 8 * clamp(prompt_tokens / 256, 1, 4)}


@dataclass(frozen=True)
class RotatedBitsParameters:
    """Of the storage, beside those of the eviction."""

    key_bits: int = param(4, "bits of a number of a kept key, the correction's included", choices=(2, 3, 4))
    value_bits: int = param(4, "bits of a number of a kept value", choices=(1, 2, 3, 4))
    corrected: bool = param(True, "one bit of a key's numbers is the sign of the remainder")
    finer: str = finer_param()

    def __post_init__(self) -> None:
        parse_finer(self.finer)
        super().__post_init__()  # type: ignore[misc]


class RotatedBits(FewBits):
    """Each kept key and value by itself: a length, and the codes of its turned direction, as TurboQuant has them."""

    @classmethod
    def kept_form(cls, params: Any, counts: tuple[tuple[int, ...], ...]) -> Quantised:
        bits = (params.key_bits,) * len(counts), (params.value_bits,) * len(counts)
        return Quantised(0, 1, 0, 0, *bits, ROTATED, params.corrected, SEED, counts)


class TurboQuant(PackedTokens):
    """Every vector is stored as its length and the codes of its turned direction. After a random rotation the numbers
    of a unit vector all follow one known distribution, so that fixed levels, the best for that distribution, serve all
    tokens, layers and heads without a calibration (paper Algorithm 1). Of a key's bits one is the sign of the remainder
    under a random Gaussian projection, with the remainder's length: so inner products with queries are right on average
    (Algorithm 2).

    `METHOD+turboquant` packs what a prompt eviction keeps. Departures: whole bits only; the paper's 2.5 and 3.5 bits
    give some channels one more. The newest tokens stay exact until a block of `residual` is there. Packed tokens are
    restored before the attention.
    """

    name = "turboquant"
    title = "TurboQuant"
    paper = "Zandieh et al., TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate, ICLR 2026"
    summary = (
        "keeps every token in few bits: turned by a random rotation and rounded to fixed levels, the newest exactly"
    )
    Parameters = TurboQuantParameters
    presets = {  # noqa: RUF012
        "paper": {},
        "3 bits": {"key_bits": 3, "value_bits": 3},
        "uncorrected": {"corrected": False},
        "demo": {"group": 8, "residual": 16},
    }
    lends = Lending(
        storage=Lent(
            "turboquant", RotatedBits, RotatedBitsParameters, "in few bits by a random rotation", refuses_few_bits
        )
    )
    params: TurboQuantParameters

    @classmethod
    def form(cls, params: TurboQuantParameters, shape: KVShape, positions: int) -> Quantised:
        bits = (params.key_bits,) * shape.layers, (params.value_bits,) * shape.layers
        return Quantised(0, params.group, params.residual, positions, *bits, ROTATED, params.corrected, SEED)
