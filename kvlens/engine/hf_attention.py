"""The seam with transformers: one registered attention function and a Cache whose layers hand everything to a session.

`SessionLayer.update` writes the new KV to the session and returns the new tokens' keys with the session attached to the
tensor; the registered function reads it there and lets the session attend. So nothing is patched, nothing is global,
and several sessions can share one model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvlens.kernels.attend import LayerForm
from kvlens.shape import KVShape

ATTENTION = "kvlens"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments by which a model asks for attention that a session without forms does not compute."""


class LayerSession(Protocol):
    """What the seam needs of a session."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None: ...
    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor: ...
    def tokens_seen(self, layer: int) -> int: ...


class SessionLayer(CacheLayerMixin):
    """A cache layer that owns nothing. Its length is the number of tokens the model has seen, whatever was kept of
    them."""

    is_sliding = False
    is_croppable = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, session: LayerSession, layer: int) -> None:
        super().__init__()
        self.session, self.layer, self.is_initialized = session, layer, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: the session took its memory when it began."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.shape[0] != 1:
            raise ValueError("kvlens runs one sequence at a time (batch 1, no padding).")
        self.session.write(self.layer, key_states[0], value_states[0])
        key_states.kvlens_session = self.session  # type: ignore[attr-defined]
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.session.tokens_seen(self.layer)

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """query_length: before transformers 5.3 the positions of the queries."""
        queries = len(query_length) if isinstance(query_length, torch.Tensor) else query_length
        return self.get_seq_length() + queries, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.3

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a kvlens session is driven forward only: no crop, reorder, reset or offload from outside.")

    offload = prefetch = crop = reorder_cache = reset = _refuse


class SessionCache(Cache):
    """The Cache object for `model(past_key_values=...)`."""

    def __init__(self, session: LayerSession, layers: int) -> None:
        super().__init__(layers=[SessionLayer(session, layer) for layer in range(layers)])


def attention_modules(model: Any, layers: int) -> list[Any] | None:
    """The attention of each layer; None: a model in which it cannot be told."""
    modules = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")]
    ordered = sorted(modules, key=lambda module: int(module.layer_idx))
    return ordered if [module.layer_idx for module in ordered] == list(range(layers)) else None


def refuse_unsupported(module: torch.nn.Module, asked: Mapping[str, Any]) -> None:
    """Raises ValueError where a layer asks, among an attention function's further arguments, for what none of ours
    computes."""
    refused = [name for name in UNSUPPORTED if asked.get(name) is not None]
    if refused:
        raise ValueError(f"layer {module.layer_idx} uses {', '.join(refused)}, which kvlens does not compute.")


def refuse_unhonoured(module: torch.nn.Module, options: Mapping[str, Any], session: LayerSession, layer: int) -> None:
    """Raise ValueError where a layer asks for what the session does not compute. The new tokens have been seen."""
    if not hasattr(session, "form"):
        refuse_unsupported(module, options)
        window = options.get("sliding_window")
        if window is not None and session.tokens_seen(layer) > window:
            raise ValueError(
                f"layer {module.layer_idx} attends within a sliding window of {window:,} tokens, which this command "
                f"does not compute: give at most {window:,} tokens."
            )
    elif options.get("position_bias") is not None:
        refuse_unsupported(module, {"position_bias": options["position_bias"]})


@contextmanager
def attending(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Inside, the model attends by the function that transformers knows under `name`; before and after, by its own."""
    previous = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers: query [1, Hq, m, D], key and value the new tokens only -> [1, m, Hq,
    D].

    Raises ValueError where a layer asks for what the session does not compute, RuntimeError without a session's cache.
    """
    session: LayerSession | None = getattr(key, "kvlens_session", None)
    if session is None:
        raise RuntimeError("the 'kvlens' attention needs past_key_values of a kvlens session.")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    refuse_unhonoured(module, kwargs, session, layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return session.attend(layer, query, scale).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention)


def forms_of(model: Any, shape: KVShape) -> tuple[LayerForm, ...]:
    """Return each layer's form in a run with these windows; () where every layer is plain."""
    softcap = float(getattr(model.config, "attn_logit_softcapping", None) or 0.0)
    modules = attention_modules(model, shape.layers) or [None] * shape.layers
    sinks = [None if module is None else getattr(module, "sinks", None) for module in modules]
    sinks = [None if logits is None else logits.detach() for logits in sinks]
    if not softcap and not shape.windows and all(logits is None for logits in sinks):
        return ()
    windows = shape.windows or (0,) * shape.layers
    return tuple(LayerForm(window, softcap, logits) for window, logits in zip(windows, sinks, strict=True))
