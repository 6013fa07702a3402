"""The demo model's forward pass in training, and its loss."""

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from kvlens.lab.training.demo import circuit
from kvlens.lab.training.demo.rows import KINDS, Row

TEXT_WEIGHT, COPY_WEIGHT = 0.4, 0.5


def rope(position: torch.Tensor, head: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine tables [rows, 1, length, head] for explicit position ids."""
    turn = 1.0 / (theta ** (torch.arange(0, head, 2).float() / head))
    angle = position[..., None].float() * turn
    angle = torch.cat((angle, angle), -1)[:, None]
    return angle.cos(), angle.sin()


def _rotate(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def hidden_states(model: LlamaForCausalLM, ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The stock forward pass without mask tensors; with gaps in position_ids transformers would see packed
    sequences."""
    config = model.config
    rows, length = ids.shape
    size, eps = (config.hidden_size,), config.rms_norm_eps

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(rows, length, count, circuit.HEAD_SIZE).transpose(1, 2)

    x = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        attention = layer.self_attn
        h = F.rms_norm(x, size, layer.input_layernorm.weight, eps)
        q = heads(attention.q_proj(h), circuit.QUERY_HEADS)
        k = heads(attention.k_proj(h), circuit.KV_HEADS)
        v = heads(attention.v_proj(h), circuit.KV_HEADS)
        q, k = q * cos + _rotate(q) * sin, k * cos + _rotate(k) * sin
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attention.o_proj(o.transpose(1, 2).reshape(rows, length, -1))
        x = x + layer.mlp(F.rms_norm(x, size, layer.post_attention_layernorm.weight, eps))
    return F.rms_norm(x, size, model.model.norm.weight, eps)


def loss_and_counts(
    model: LlamaForCausalLM, rows: list[Row], ids: torch.Tensor, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted loss; counts [answer loss, template loss, English loss, then answers right and asked per kind]."""
    answer, text, real = (torch.zeros(ids.shape) for _ in range(3))
    copy = KINDS.index("copy")
    for index, row in enumerate(rows):
        if row.real:
            real[index] = 1.0
        elif row.answers[:1] and row.answers[0][2] == copy:
            answer[index, row.answers[0][0] : row.answers[0][1]] = COPY_WEIGHT
        else:
            text[index] = (ids[index] != 0).float()
            for start, end, _ in row.answers:
                answer[index, start:end], text[index, start:end] = 1.0, 0.0
    cos, sin = rope(position, circuit.HEAD_SIZE, circuit.THETA)
    logits = F.linear(hidden_states(model, ids, cos, sin)[:, :-1], model.model.embed_tokens.weight)
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(rows), -1)
    parts = [(loss * weight[:, 1:]).sum() / weight[:, 1:].sum().clamp(min=1) for weight in (answer, text, real)]
    plain = (loss * (text + 2 * real)[:, 1:]).sum() / (text + 2 * real)[:, 1:].sum().clamp(min=1)
    counts = torch.zeros(3 + 2 * len(KINDS))
    counts[:3] = torch.stack(parts).detach()
    with torch.no_grad():
        right = logits.argmax(-1) == ids[:, 1:]
        for index, row in enumerate(rows):
            for start, end, kind in row.answers:
                counts[3 + 2 * kind] += right[index, start - 1 : end - 1].all()
                counts[4 + 2 * kind] += 1
    return parts[0] + TEXT_WEIGHT * plain, counts
