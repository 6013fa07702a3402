"""Layer bits: every token stays, keys and values of each layer in bits of their own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvlens.finer import parse_finer
from kvlens.methods.families.packed_tokens import PackedTokens
from kvlens.methods.fitting import clamp
from kvlens.methods.parameters import finer_param, param
from kvlens.quantised.form import Quantised
from kvlens.shape import KVShape

WIDTHS = (1, 2, 3, 4, 8)
CHANGE = re.compile(r"(\d+)(?:-(\d+))?:(\d+)/(\d+)", re.ASCII)
"""FIRST[-LAST]:KEYS/VALUES"""


@dataclass(frozen=True)
class LayerBitsParameters:
    """Lengths are in tokens."""

    keys: int = param(4, "bits of a number of a key in layers that `layers` does not name", choices=WIDTHS, ours=True)
    values: int = param(2, "the same of a value", choices=WIDTHS, ours=True)
    layers: str = param(
        "",
        "layers with other bits, as FIRST-LAST:KEYS/VALUES, comma-separated: '0:8/8,28-29:4/4'; empty: none",
        ours=True,
    )
    group: int = param(32, "tokens (of keys) or channels (of values) that share scale and zero", symbol="G")
    residual: int = param(32, "newest tokens in full precision, a multiple of the group", symbol="R")
    finer: str = finer_param()

    def __post_init__(self) -> None:
        parse_finer(self.finer)
        if self.group < 8 or self.group % 8:
            raise ValueError("group must be a multiple of 8, so that its codes fill whole bytes.")
        if self.residual < 1 or self.residual % self.group:
            raise ValueError(f"residual must be a multiple of the group, {self.group}.")
        self.changes()

    def changes(self) -> list[tuple[range, int, int]]:
        """Return (layers, bits of keys, bits of values) as `layers` names them. Raises ValueError with one sentence."""
        changes = []
        for text in filter(None, (part.strip() for part in self.layers.split(","))):
            match = CHANGE.fullmatch(text)
            start, last, keys, values = (
                (None if part is None else int(part) for part in match.groups()) if match else (None,) * 4
            )
            if start is None or keys not in WIDTHS or values not in WIDTHS or (last is not None and last < start):
                widths = ", ".join(map(str, WIDTHS))
                raise ValueError(f"layers takes FIRST-LAST:KEYS/VALUES with bits of {widths}, not '{text}'.")
            changes.append((range(start, (start if last is None else last) + 1), keys, values))
        return changes

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The residual is an eighth of the prompt in groups of 32, 128 at most, one group at least, and one where the
        budget is below a quarter of full KV. Values have 2 bits, and keys 4 where the budget is at least 30 % of full
        KV of 16 bits a number, else 2. Ours."""
        share = 1.0 if budget_bytes is None else budget_bytes / shape.full_kv_bytes(prompt_tokens + 1 + max_new)
        narrow = share < 0.30 * 2 / shape.itemsize
        groups = (prompt_tokens + 1) // 256 if share >= 0.25 else 1
        return {"keys": 2 if narrow else 4, "values": 2, "residual": 32 * clamp(groups, 1, 4)}


class LayerBits(PackedTokens):
    """Quantises in groups with a scale and a zero, keys per channel and values per token, with as many bits as each
    layer needs: keys and values have bits of their own, and single layers others. Papers choose them by a search with
    calibration data; here a person does, or the lens, which shows the layers whose error costs the answer.

    Departures: no outliers are stored beside the codes and levels are even, where KVQuant has both; KVQuant quantises
    keys before their rotary embedding and keeps the first tokens exact. Nothing is calibrated. The default bits are of
    no paper.
    """

    name = "layerbits"
    title = "Layer bits"
    paper = (
        "after Hooper et al., KVQuant, NeurIPS 2024, and Li et al., KVTuner: Sensitivity-Aware Layer-Wise "
        "Mixed-Precision KV Cache Quantization, ICML 2025"
    )
    summary = "keeps every token in few bits, keys and values of each layer in as many as parameters say"
    Parameters = LayerBitsParameters
    presets = {"paper": {}, "even": {"keys": 4, "values": 4}, "demo": {"residual": 32}}  # noqa: RUF012
    params: LayerBitsParameters

    @classmethod
    def form(cls, params: LayerBitsParameters, shape: KVShape, positions: int) -> Quantised:
        keys, values = [params.keys] * shape.layers, [params.values] * shape.layers
        for layers, key, value in params.changes():
            if layers.stop > shape.layers:
                raise ValueError(f"layers names layer {layers.stop - 1}, and the model has {shape.layers}.")
            for layer in layers:
                keys[layer], values[layer] = key, value
        return Quantised(0, params.group, params.residual, positions, tuple(keys), tuple(values))
