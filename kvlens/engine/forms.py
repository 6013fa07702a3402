"""What the layers of a model have besides scaled scores: sliding windows, a cap on scores, sink logits."""

from __future__ import annotations

from typing import Any

from kvlens.engine.hf_attention import attention_modules
from kvlens.kernels.attend import LayerForm
from kvlens.shape import KVShape


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
