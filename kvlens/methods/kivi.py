"""KIVI: every token stays, in two or four bits; keys are packed per channel, values per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlens.finer import parse_finer
from kvlens.methods.families.few_bits import FewBits, refuses_few_bits
from kvlens.methods.families.packed_tokens import PackedTokens
from kvlens.methods.fitting import clamp
from kvlens.methods.parameters import finer_param, param
from kvlens.methods.wrappers import Lending, Lent
from kvlens.quantised.form import Quantised
from kvlens.shape import KVShape


@dataclass(frozen=True)
class KIVIParameters:
    """Lengths are in tokens. Defaults are those of the paper's main results."""

    bits: int = param(2, "bits of a number", symbol="b", choices=(2, 4))
    group: int = param(32, "tokens (of keys) or channels (of values) that share scale and zero", symbol="G")
    residual: int = param(128, "newest tokens in full precision, a multiple of the group", symbol="R")
    finer: str = finer_param()

    def __post_init__(self) -> None:
        parse_finer(self.finer)
        if self.group < 4 or self.group % 4:
            raise ValueError("group must be a multiple of 4, so that its codes fill whole bytes.")
        if self.residual < 1 or self.residual % self.group:
            raise ValueError(f"residual must be a multiple of the group, {self.group}.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The residual is one eighth of the prompt in whole groups of 32, the paper's 128 at most, and one group at
        least; one group where the budget is below a quarter of full KV. Two bits: fewer
        bytes than these cannot be had, whatever the budget. Ours."""
        share = 1.0 if budget_bytes is None else budget_bytes / shape.full_kv_bytes(prompt_tokens + 1 + max_new)
        groups = (prompt_tokens + 1) // 256 if share >= 0.25 else 1
        return {"residual": 32 * clamp(groups, 1, 4)}


@dataclass(frozen=True)
class GroupedBitsParameters:
    """Of the storage, beside those of the eviction."""

    code_bits: int = param(2, "bits of a number of a kept token", symbol="b", choices=(2, 4))
    code_group: int = param(32, "kept tokens (of keys) or channels (of values) that share scale and zero", symbol="G")
    finer: str = finer_param()

    def __post_init__(self) -> None:
        parse_finer(self.finer)
        super().__post_init__()  # type: ignore[misc]
        if self.code_group < 4 or self.code_group % 4:
            raise ValueError("code_group must be a multiple of 4, so that its codes fill whole bytes.")


class GroupedBits(FewBits):
    """Keys per channel over groups of kept tokens, values per token over groups of channels, as KIVI packs them."""

    @classmethod
    def kept_form(cls, params: Any, counts: tuple[tuple[int, ...], ...]) -> Quantised:
        return Quantised(params.code_bits, params.code_group, 0, 0, kept_counts=counts)


class KIVI(PackedTokens):
    """Quantises asymmetrically (paper sec. 3.2): keys per channel over groups of G consecutive tokens, values per token
    over groups of G channels, scale and zero in float16. Keys stay exact until R of them are there and are packed
    together; of the values the newest R stay exact (Algorithm 1). Prefill attends exactly; every token is attended at
    every step, packed ones as the bits hold them. At b bits a number takes b + 32 / G: 3 bits at 2 and G = 32, 18.75 %
    of 16 and not 12.5 %.

    `METHOD+kivi` packs what a prompt eviction keeps. Departures: packed tokens are restored before the attention, not
    inside its kernel. A head size that G does not divide has a shorter last group. The prompt's last token, which step
    0 feeds, is not yet there when the prompt is packed.
    """

    name = "kivi"
    title = "KIVI"
    paper = "Liu et al., KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, ICML 2024"
    summary = "keeps every token in two or four bits, keys packed per channel and values per token, the newest exactly"
    Parameters = KIVIParameters
    presets = {"paper": {}, "4 bits": {"bits": 4}, "demo": {"residual": 32}}  # noqa: RUF012
    lends = Lending(storage=Lent("kivi", GroupedBits, GroupedBitsParameters, "in few bits by group", refuses_few_bits))
    params: KIVIParameters

    @classmethod
    def form(cls, params: KIVIParameters, shape: KVShape, positions: int) -> Quantised:
        return Quantised(params.bits, params.group, params.residual, positions)
