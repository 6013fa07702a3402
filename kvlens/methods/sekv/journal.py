"""The journal entries that SeKV writes."""

from __future__ import annotations

JOURNAL: dict[str, str] = {
    "whole": "whole_share only: 1 for each KV head of the layer that keeps every token, 0 for the others; per layer",
    "logit_tau": "threshold of each query head on the scale of the scores (before the sigmoid), at the end of "
    "prefill; none: a head that "
    "expands nothing, or asks for everything (zoom_rate=1)",
    "spans": "ids of the spans that went to host memory together; every other vector is per span in this order",
    "rank_k": (
        "components of the span's keys that the gates keep, per span; also where the span lies raw because "
        "factors are larger"
    ),
    "rank_v": "components of the span's values that the gates keep, per span",
    "rank_k_post_rope": (
        "pre_rope only: components that the gates would keep of the same keys after their rotary embedding, per span"
    ),
    "err_k_pre_rope": "pre_rope only: relative Frobenius error of the best rank_k components of the keys before "
    "their rotary "
    "embedding, per span; the same after turning them to their positions, since a turn keeps the norm",
    "err_k_post_rope": (
        "pre_rope only: the same for as many components of the keys after their rotary embedding, per span"
    ),
}
"""What SeKV notes, once per placement (end of prefill, a block leaving the window), per (layer, KV head); `spans` once
for all."""
