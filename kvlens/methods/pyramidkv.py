"""PyramidKV: SnapKV with more tokens in the first layers and fewer in the last."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.methods.families.prompt_eviction import Tokens
from kvlens.methods.families.token_shares import round_shares
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.snapkv import SnapKV, SnapKVParameters


@dataclass(frozen=True)
class PyramidKVParameters(SnapKVParameters):
    """Lengths are in tokens. Defaults are those of the authors' run script."""

    window: int = param(8, "last prompt tokens: their queries rank the others; kept themselves", symbol="alpha")
    beta: float = param(20.0, "the last layer keeps 1/beta of the average, window left out", symbol="beta")
    rounding: str = param(
        "even",
        "even: all layers together keep as many tokens as SnapKV does. floor: the step between layers is rounded down, "
        "as in the authors' code, so that the last layers and the sum keep more than was asked for",
        choices=("even", "floor"),
        ours=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise ValueError("beta must be at least 1.")


class PyramidKV(SnapKV):
    """Scores as SnapKV; divides the budget over the layers so that it falls evenly from the first to the last (paper
    sec. 4.2, eq. 3): with C tokens besides the window on average, the last layer keeps C / beta and the first one 2C -
    C / beta. A prompt shorter than 2C is divided equally, as in the authors' code.

    Departures: as SnapKV's. The authors round the step between layers down, and so keep up to several per cent more
    than the same budget gives SnapKV; here the sum is exact unless `rounding` asks for theirs.
    """

    name = "pyramidkv"
    title = "PyramidKV"
    paper = "Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, 2024"
    summary = (
        "drops prompt tokens once, when prefill ends: what the last prompt tokens attend to stays, more of it in the "
        "first layers than in the last"
    )
    Parameters = PyramidKVParameters
    presets = {"paper": {}, "demo": {"beta": 4.0}}  # noqa: RUF012
    journal_names = {  # noqa: RUF012
        "layer_budget_tokens": "prompt tokens kept, window included, by layer"
    }
    params: PyramidKVParameters

    def tokens(self, prompt: Prefilled | None, total: int) -> Tokens:
        import torch

        p, layers = self.params, self.context.shape.layers
        n = self.context.prompt_tokens + self.last
        window = min(p.window, n)
        if p.rounding == "floor":
            counts = [window + c for c in falling_by_whole_steps(total // layers - window, layers, n - window, p.beta)]
        else:
            shares = falling(total / layers - window, layers, n - window, p.beta)
            counts = [window + c for c in round_shares(shares, total - layers * window)]
        self.note("layer_budget_tokens", torch.tensor(counts, dtype=torch.float32))
        return [[count] for count in counts]


def falling(average: float, layers: int, most: int, beta: float) -> list[float]:
    """Tokens besides the window by layer, `average` of them on average, at most `most` in one: even steps from the
    first layer down to the last."""
    if layers == 1 or most <= 2 * average:
        return [average] * layers
    lowest = average / beta
    step = 2 * (average - lowest) / (layers - 1)
    return [lowest + step * (layers - 1 - layer) for layer in range(layers)]


def falling_by_whole_steps(average: int, layers: int, most: int, beta: float) -> list[int]:
    """As `falling`, in whole numbers as the authors' code has them: the step rounded down, counted from the first
    layer."""
    if layers == 1 or most <= 2 * average:
        return [min(average, most)] * layers
    lowest = int(average // beta)
    highest = 2 * average - lowest
    step = (highest - lowest) // (layers - 1)
    return [highest - step * layer for layer in range(layers)]
