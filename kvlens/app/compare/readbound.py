"""The physical limit of a step's time: what a step reads whatever the method does."""

from __future__ import annotations

from kvlens.meta import RunMeta

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def weights_share(meta: RunMeta) -> float | None:
    """Return the weights that a step reads as a share of all bytes that a step of full KV reads: these and all keys and
    values.

    Where reading memory bounds a step, no method's step can be shorter than this share of full KV's. None if the trace
    lacks the number of weights that a step reads (it does for a mixture of experts), their number format or the bytes
    of full KV."""
    size = ITEM_BYTES.get(meta.dtype or "")
    if size is None or meta.model_info is None or not meta.model_info.step_parameters or not meta.full_kv_bytes:
        return None
    weights = meta.model_info.step_parameters * size
    return weights / (weights + meta.full_kv_bytes)
