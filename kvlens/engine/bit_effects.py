"""What lost tokens owe to the few bits of packed keys and values: the effect of every (layer, KV head, side), in
logits.

*Lead* is the logit of full KV's token minus that of the method's, at a lost step. Full KV follows the reference's
tokens with gradients, while the prompt's keys and values are `way` of the way from exact ones to those that the codes
hold. The effect of a side is the gradient of lead by its numbers times their error, the mean over POINTS points of that
way. Effects of all sides add up to what lead loses on the way, to the error of so few points. Tokens that the method
dropped are attended here, so effects rank sides; a trial proves them.

Ours: integrated gradients (Sundararajan et al. 2017, section 3) with the packed numbers as the features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvlens.engine.comparison import Reference
from kvlens.engine.effect import FullAttention, reach
from kvlens.engine.hf_attention import SessionCache, forms_of
from kvlens.engine.loop import Generation
from kvlens.engine.options import Options
from kvlens.engine.prefill import ReadPrompt
from kvlens.engine.session import Session
from kvlens.engine.unread import Query, Unread
from kvlens.finer import KEYS, SIDES
from kvlens.kernels.attend import grouped_output
from kvlens.methods.run_inputs import RunContext
from kvlens.quantised.form import Quantised

if TYPE_CHECKING:
    from kvlens.budget import Budget
    from kvlens.engine.engine import Engine
    from kvlens.methods.base import Method
    from kvlens.text.prompts import Prompt

POINTS = 4
Side = tuple[int, int, str]
"""(layer as the method numbers it, KV head, KEYS or VALUES)"""


@dataclass(frozen=True)
class PackedPrompt:
    """A prompt as a method's codes hold it."""

    form: Quantised
    context: RunContext
    """the method's own"""
    layers: tuple[int | None, ...]
    """the method's number of each layer of the model; None: it does not act there"""
    keys: tuple[torch.Tensor, ...]
    """of each layer of the model [H_kv, n, D]"""
    values: tuple[torch.Tensor, ...]


@torch.inference_mode()
def packed_prompt(
    engine: Engine,
    prompt: Prompt,
    method: type[Method],
    params: Any,
    budget: Budget | None,
    options: Options,
    read: ReadPrompt,
) -> PackedPrompt | None:
    """Place the prompt and return what its codes hold; None: the method packs nothing. Raises BudgetInfeasible."""
    session = Session(method, params, engine.context(prompt, budget, options))
    try:
        with engine.whole(prompt):
            Generation(engine.loaded, prompt, session, options).place(read)
        packed = session.memory.packed
        if packed is None:
            return None
        numbers = tuple(session.windowed.own.get(layer) for layer in range(engine.loaded.shape.layers))
        pairs = [
            (keys, values) if number is None else packed.overlay(number, keys, values)
            for number, keys, values in zip(numbers, read.keys, read.values, strict=True)
        ]
        keys, values = zip(*pairs, strict=True)
        return PackedPrompt(packed.form, session.method.context, numbers, keys, values)
    finally:
        session.close()


class _PartWay(FullAttention):
    """A session of full KV whose prompt keys and values are leaves of the graph."""

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        query = Query(q[0].unflatten(0, (len(self.keys[layer]), -1)), scaling)
        weights = self._weights(layer, query, self.keys[layer])
        output = grouped_output(weights, self._all_values(layer, self.values[layer])[:, 0])
        return output.flatten(0, 1)[None].to(q.dtype)


def bit_effects(
    engine: Engine,
    read: ReadPrompt,
    packed: PackedPrompt,
    reference: Reference,
    lost: Mapping[int, int],
    check: Callable[[], None] = lambda: None,
) -> dict[Side, float]:
    """Return the effects in logits on the first lost steps within reach. lost: the method's likeliest token by lost
    step; `check` is called before every point and may raise. {}: the context is too long for gradients."""
    loaded = engine.loaded
    most = reach(loaded.shape, len(read.ids) + len(reference.ids))
    if most < 1:
        return {}
    steps = [step for step in sorted(lost) if step < min(lost) + most]
    begin = max(0, steps[-1] + 1 - most)
    pairs = {step: (int(reference.logits[step].argmax()), lost[step]) for step in steps}
    effects: dict[Side, float] = {}
    for point in range(POINTS):
        check()
        for side, gradients in zip(
            SIDES, _slopes(engine, read, packed, reference.ids, pairs, begin, (point + 0.5) / POINTS), strict=True
        ):
            exact, coded = (read.keys, packed.keys) if side == KEYS else (read.values, packed.values)
            for layer, number in enumerate(packed.layers):
                if number is None:
                    continue
                error = coded[layer].double() - exact[layer].double()
                parts = -(gradients[layer].double() * error).sum((1, 2)) / POINTS
                for head, part in enumerate(parts.tolist()):
                    effects[number, head, side] = effects.get((number, head, side), 0.0) + part
    return effects


def _slopes(
    engine: Engine,
    read: ReadPrompt,
    packed: PackedPrompt,
    ids: Sequence[int],
    pairs: Mapping[int, tuple[int, int]],
    begin: int,
    way: float,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of the lead by prompt keys and by values, of each layer [H_kv, n, D]."""
    loaded = engine.loaded
    fed = torch.tensor([[read.ids[-1], *ids[: max(pairs)]]], device=loaded.model.device)
    forms = forms_of(loaded.model, loaded.shape.bound(len(read.ids) + len(ids)))
    with torch.inference_mode(False):
        leaves = [
            [(old + way * (new - old)).detach().clone().requires_grad_(True) for old, new in zip(*both, strict=True)]
            for both in ((read.keys, packed.keys), (read.values, packed.values))
        ]
        keys, values = leaves
        decoded = [[states[:, :0].detach() for states in side] for side in leaves]
        nothing = Unread(torch.empty(0, dtype=torch.long), 0, torch.empty(0, dtype=torch.double))
        session = _PartWay(keys, values, nothing, way, decoded[0], decoded[1], forms)
        cache = SessionCache(session, loaded.shape.layers)
        if begin:
            with torch.no_grad():
                loaded.model.base_model(input_ids=fed[:, :begin], past_key_values=cache, use_cache=True)
        with torch.enable_grad():
            logits = loaded.model(input_ids=fed[:, begin:], past_key_values=cache, use_cache=True).logits[0]
            leads = [
                logits[step - begin, token] - logits[step - begin, rival] for step, (token, rival) in pairs.items()
            ]
            slopes = torch.autograd.grad(torch.stack(leads).double().sum(), [*keys, *values])
    return list(slopes[: len(keys)]), list(slopes[len(keys) :])
