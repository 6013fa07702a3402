"""Half of the budget by a score, the other half by the score times what a token's value does to the layer's output: a
part of a prompt eviction that any score can be put into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.prompt_eviction import PromptEviction, lacks_score
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Inputs, Prefilled

if TYPE_CHECKING:
    import torch

    Base = PromptEviction
else:
    Base = object

PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense")
"""what the supported families call the output projection inside their attention modules"""


@dataclass(frozen=True)
class TwoStagesParameters:
    """Beside those of the score."""

    first_stage: float = param(0.5, "share of the tokens that the score alone chooses", symbol="alpha")
    epsilon: float = param(1e-4, "added to a score, in its units, before it is weighed", symbol="epsilon")

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if not 0 <= self.first_stage <= 1:
            raise ValueError("first_stage must lie between 0 and 1.")
        if self.epsilon < 0:
            raise ValueError("epsilon must be at least 0.")


class TwoStages(Base):
    """The best of each KV head by the score fill `first_stage` of its own tokens. The others rank by (score + epsilon)
    times the L1 norm of the token's projected value, averaged over the KV head's query heads.
    A negative score falls as the value grows, as in the press of kvpress."""

    static_ready = False
    """the prompt is read for each run, whose attention modules it reads"""
    params: Any

    @classmethod
    def needs_with(cls, params: Any) -> Needs:
        from dataclasses import replace

        return replace(super().needs_with(params), inputs=True)

    def score(self, prompt: Prefilled, layer: int, end: int) -> torch.Tensor:
        import torch

        assert prompt.inputs is not None
        score: torch.Tensor = super().score(prompt, layer, end)  # type: ignore[safe-super]
        weighed = (score + self.params.epsilon) * self._norms(prompt.inputs, prompt.values[layer, :, :end], layer)
        window = self.context.prompt_tokens + self.last - end
        counts = [int(max(count - window, 0) * self.params.first_stage) for count in self.granted[layer]]
        order = score.argsort(dim=-1, descending=True, stable=True)
        places = torch.empty_like(order).scatter_(-1, order, torch.arange(end, device=order.device).expand(order.shape))
        highest = weighed.nan_to_num(nan=-torch.inf).amax()
        lifted = highest + highest.abs() * 1e-3 + (end - places).float()
        is_best = (places < torch.tensor(counts, device=places.device)[:, None]) & ~score.isnan()
        return torch.where(is_best, lifted, weighed)

    def comparable(self, prompt: Prefilled, layer: int, end: int) -> torch.Tensor:
        """Return the score alone: the first stage lifts as many tokens of every KV head."""
        score: torch.Tensor = super().score(prompt, layer, end)  # type: ignore[safe-super]
        return score

    def _norms(self, inputs: Inputs, values: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the L1 norm of W_O v: values [H_kv, m, D] -> float32 [H_kv, m]."""
        import torch

        shape = self.context.shape
        weight = output_weight(inputs.modules[layer], shape.q_heads * shape.head_dim).float().to(values.device)
        by_head = weight.unflatten(1, (shape.kv_heads, shape.group, shape.head_dim))  # [hidden, H_kv, G, D]
        norms = torch.zeros(values.shape[:2], device=values.device)
        for member in range(shape.group):
            for head in range(shape.kv_heads):
                norms[head] += (values[head].float() @ by_head[:, head, member].T).abs().sum(-1)
        return norms / shape.group


def output_weight(module: Any, columns: int) -> torch.Tensor:
    """Return the weight of an attention module's output projection [hidden, columns], columns being query heads times
    head size. Raises ValueError with one sentence if it is under no known name."""
    for name in PROJECTIONS:
        weight = getattr(getattr(module, name, None), "weight", None)
        if weight is not None and columns in weight.shape:
            matrix: torch.Tensor = weight if weight.shape[1] == columns else weight.T
            return matrix
    raise ValueError("it needs the output projection of the attention, which this model has under no known name.")


def refuses_two_stages(method: type[Any]) -> str:
    """Return why a method's score cannot be weighed by values; '': it can."""
    if lacking := lacks_score(method):
        return lacking
    if issubclass(method, TwoStages):
        return "it weighs its score by values already"
    if method.one_set:
        return "all KV heads of its layers keep the same tokens, whose values differ by head"
    return "" if method.heads_alike else "it divides a layer's budget over its KV heads itself: put that part in front"
