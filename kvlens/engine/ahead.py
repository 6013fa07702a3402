"""A look ahead: a layer's query estimated from what the attention of the layer before it is given.

The next layer's own attention module is run on that input, with a cache that keeps the query and lets nothing attend:
so norms of queries, rotary embedding and fused projections are the model's, whatever its family. Hooks stand for one
step only, and act on the calls that carry the session's cache.
"""

from __future__ import annotations

from typing import Any, Self

import torch

from kvlens.engine.border import scored
from kvlens.engine.hf_attention import SessionCache, attention_modules
from kvlens.engine.session import Session
from kvlens.kernels.attend import LayerForm
from kvlens.refusal import Refusal


class Glance:
    """Stands where a session does: takes a query and attends nothing. q [Hq, D] of the call before."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.q: torch.Tensor

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The keys and values of an estimate are nobody's."""

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        self.q = scored(q[0, :, 0], scaling)
        return torch.zeros_like(q)

    def form(self, layer: int) -> LayerForm:
        return self._session.form(layer)

    def tokens_seen(self, layer: int) -> int:
        return self._session.tokens_seen(layer)


class LookAhead:
    """Within it, a step of the session lets its method select for every layer but the first while the layer before it
    runs. Raises ValueError for a model in which the attention of every layer cannot be told."""

    def __init__(self, model: Any, session: Session, cache: SessionCache) -> None:
        modules = attention_modules(model, session.shape.layers)
        if modules is None:
            raise Refusal(
                f"{session.method.name} looks one layer ahead, which kvlens cannot do in this model.",
                code="cannot_look_ahead",
                method=session.method.name,
            )
        self.layers, self.session, self.cache = modules, session, cache
        self.glance = Glance(session)
        self._blind = SessionCache(self.glance, session.shape.layers)
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for layer, module in enumerate(self.layers[:-1]):
            hook = self._hook(layer + 1)
            self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *raised: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def query(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The query [Hq, D] that `layer` would have if its attention were called like this; None: the call is not of
        this session."""
        own_kwargs = {name: self._blind for name, value in kwargs.items() if value is self.cache}
        blinded_args = tuple(self._blind if value is self.cache else value for value in args)
        if not own_kwargs and all(a is b for a, b in zip(blinded_args, args, strict=True)):
            return None
        self.layers[layer].forward(*blinded_args, **{**kwargs, **own_kwargs})
        return self.glance.q

    def _hook(self, layer: int) -> Any:
        def note_inputs(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            q = self.query(layer, args, kwargs)
            if q is not None:
                self.session.look_ahead(layer, q)

        return note_inputs
