"""Loki: keys lie in few dimensions, the same for every text; scores in these choose the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.token_retrieval import TokenRetrievalParameters
from kvlens.methods.families.turned_keys import TurnedKeys
from kvlens.methods.modelfigures import Calibration, Content, shipped
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LokiParameters(TokenRetrievalParameters):
    """Lengths are in tokens. Defaults are those of the paper's main setting."""

    partial: float = param(0.25, "share of a key's dimensions in which scores are estimated", symbol="d_f")
    most_fetched: float = param(0.25, "share of the tokens so far that a KV head reads at most", symbol="k_f")
    axes: str = param(
        "calibrated",
        "main axes of the calibration's keys, or of this prompt's own (a control that needs no calibration)",
        choices=("calibrated", "prompt"),
        ours=True,
    )
    calibration: str = param(
        "", "file made by `kvlens calibrate loki`; empty: the one shipped for the model", ours=True
    )
    dense_layers: int = param(0, "first layers that keep every token; the paper has none", ours=True)
    sinks: int = param(0, "first tokens always attended; the paper has none", ours=True)
    window: int = param(16, "newest tokens always attended, until their page is full; the paper has none", ours=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.partial <= 1 or not 0 < self.most_fetched <= 1:
            raise ValueError("partial and most_fetched must lie above 0 and at most at 1.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The share of a key's dimensions is eight tenths of the budget's share of full KV, and the paper's quarter at
        most. The window is a hundredth of the prompt in whole pages of 16. Ours: the paper keeps every token on the
        device."""
        share = 1.0 if budget_bytes is None else budget_bytes / shape.full_kv_bytes(prompt_tokens + 1 + max_new)
        return {"partial": round(min(0.25, 0.8 * share), 4), "window": 16 * max(1, (prompt_tokens + 1) // 1600)}


def read_axes(content: Content, params: LokiParameters, shape: KVShape) -> Any:
    """Return the axes [L, H_kv, D, m], main ones first. Raises ValueError with one sentence where they are of another
    model's sizes, or fewer than the parameters ask for."""
    axes = content.figures["axes"]
    if tuple(axes.shape[:3]) != (shape.layers, shape.kv_heads, shape.head_dim):
        raise ValueError(f"'{content.name}' does not have axes for every KV head of every layer.")
    width = max(1, round(params.partial * shape.head_dim))
    if axes.shape[3] < width:
        raise ValueError(
            f"'{content.name}' has {axes.shape[3]} axes for each KV head, and partial={params.partial:g} asks for "
            f"{width}: lower partial."
        )
    return axes


class Loki(TurnedKeys):
    """Keys of a KV head vary mostly along few axes, and these depend on the model, not on the text. The device keeps
    each key's numbers along the first axes; the scores that they give choose the tokens, which are then attended
    exactly (paper Algorithm 1). The axes are the principal components of keys over calibration texts.

    Departures: the axes are of keys after the rotary embedding; the paper tries both and takes the better one for each
    model. The paper keeps every token on the device and reads less; here tokens are in host memory and are fetched. A
    group of query heads chooses together, by its largest score. `kvlens calibrate loki` reads generated prompts, or
    given texts, where the paper reads WikiText.
    """

    name = "loki"
    title = "Loki"
    paper = "Singhania et al., Loki: Low-rank Keys for Efficient Sparse Attention, NeurIPS 2024"
    summary = (
        "keeps all but the newest tokens in host memory and, of each key, few axes on the device, calibrated for the "
        "model; fetches the tokens that these score highest"
    )
    Parameters = LokiParameters
    presets = {"paper": {}, "demo": {"partial": 0.25}}  # noqa: RUF012
    calibrations = (
        Calibration(
            "key axes",
            "calibration",
            shipped(Path(__file__).parent, ".safetensors"),
            "kvlens calibrate loki --model {model} --out FILE",
            "set axes=prompt, which needs none",
            lambda params: params.axes == "calibrated",
            read_axes,
        ),
    )
    untrained = {"axes": "prompt"}  # noqa: RUF012
    params: LokiParameters

    def axes(self, prompt: Prefilled, width: int) -> torch.Tensor:
        stored: Any = self.context.calibration.get("key axes")
        if stored is None:
            return main_axes(prompt.keys[self.params.dense_layers :], width)
        axes: torch.Tensor = stored[self.params.dense_layers :, ..., :width].float()
        return axes

    def count(self, score: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.tensor(self.most_now, device=score.device)


def main_axes(keys: torch.Tensor, width: int) -> torch.Tensor:
    """Return the first principal components of keys [..., m, D]: float32 [..., D, width]."""
    import torch

    centred = keys.double() - keys.double().mean(-2, keepdim=True)
    return torch.linalg.eigh(centred.mT @ centred).eigenvectors.flip(-1)[..., :width].float()
