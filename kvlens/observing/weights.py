"""The attention weights of single query rows, computed beside the model's own call from the same tensors."""

from __future__ import annotations

import torch

from kvlens.observing.calls import Call

FAR = -1e9
"""an added score below this masks an entry: masks use the least number of their format"""


def scores_mask(call: Call, row: int, rows: torch.Tensor) -> torch.Tensor:
    """Return what is added to the scores of some query rows: float32 [1|Hq, r, C], -inf where an entry is not attended.
    row: of the batch; rows int64 [r]: query rows. A mask longer than the keys counts as far as they go."""
    entries, queries, device = call.key.shape[2], call.query.shape[2], call.query.device
    if call.mask is None:
        added = torch.zeros(1, len(rows), entries, device=device)
        if queries > 1 and call.causal:
            added.masked_fill_(torch.arange(entries, device=device) > rows[:, None], -torch.inf)
        return added
    mask = call.mask.expand(call.query.shape[0], -1, -1, -1)[row][:, :, :entries]
    mask = mask if mask.shape[1] == 1 else mask[:, rows]
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=device).masked_fill_(~mask, -torch.inf)
    return mask.float().masked_fill(mask < FAR, -torch.inf)


def hide(added: torch.Tensor, hidden: torch.Tensor, group: int) -> torch.Tensor:
    """Return the mask [Hq, r, C] with the entries `hidden` (bool [H_kv, C]) masked for the query heads of their KV
    heads."""
    return added.masked_fill(hidden.repeat_interleave(group, 0)[:, None], -torch.inf)


def row_weights(
    call: Call, row: int, rows: torch.Tensor, added: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (weights float32 [Hq, r, C] of some query rows, the share [Hq, r] that a learned sink takes; None: the
    model has none). added: as `scores_mask`."""
    query, keys, options = call.query[row][:, rows].float(), call.key[row].float(), call.options
    scaling = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads = keys.shape[0]
    # the query heads of a KV head go in one product: a broadcast one copies the keys for each of them
    scores = (query.reshape(heads, -1, query.shape[-1]) @ keys.mT).view(*query.shape[:2], -1) * scale
    if (cap := options.get("softcap")) is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores + added
    sinks = options.get("s_aux")
    if sinks is None:
        return scores.softmax(-1), None
    column = sinks.float().reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
    whole = torch.cat([scores, column], -1).softmax(-1)
    return whole[..., :-1], whole[..., -1]


def output_error(call: Call, row: int, rows: torch.Tensor, weights: torch.Tensor, output: torch.Tensor) -> float:
    """Return how far the weights are from the model's own output [B, m, Hq, D] of these rows: the largest difference
    over the largest number."""
    values = call.value[row].float()
    own = (weights.reshape(len(values), -1, weights.shape[-1]) @ values).view(*weights.shape[:2], -1)
    given = output[row][rows].float().transpose(0, 1)
    return float((own - given).abs().max() / given.abs().max().clamp(min=1e-12))
