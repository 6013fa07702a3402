"""How ShadowKV's chunks lie in host memory: their values alone. Keys are rebuilt on the device, from the factors of all
keys of a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlens.link.codec import Cut, Packed, Units
from kvlens.methods.run_inputs import Rotate


def decompose(keys: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best approximation of that rank of all KV heads' keys side by side: keys [H_kv, m, D] without positions ->
    factors of tokens [m, r] and what they multiply [r, H_kv, D], float32."""
    wide = keys.double().transpose(0, 1).flatten(1)
    _, axes = torch.linalg.eigh(wide.T @ wide)
    best = axes[:, -rank:].flip(1)
    return (wide @ best).float(), best.T.unflatten(1, (keys.shape[0], -1)).float()


class ValueCodec:
    """tokens [L, m, r] and basis [L, r, H_kv, D]: factors of the keys from position 0 on; rotate: gives keys their
    positions."""

    def __init__(self, tokens: Tensor, basis: Tensor, rotate: Rotate) -> None:
        self.tokens, self.basis, self.rotate = tokens, basis, rotate

    def rebuilt(self, layer: int, kv_heads: Tensor, positions: Tensor) -> Tensor:
        """Keys of tokens as attention uses them, float32: kv_heads [n], positions [n, T] -> [n, T, D]."""
        plain = self.tokens[layer, positions].float() @ self.basis[layer].transpose(0, 1)[kv_heads].float()
        turned = self.rotate(plain.flatten(0, 1), positions.flatten(), layer)
        return turned.view(plain.shape)

    def pack(self, keys: Tensor, values: Tensor, first: int, cuts: Sequence[Cut]) -> Packed:
        """Chunks of one length, one after the other from `first` on; layer after layer, KV head after KV head."""
        layers, heads, _, dim = values.shape
        length, device = cuts[0].end - cuts[0].start, values.device
        token_slice = slice(cuts[0].start - first, cuts[-1].end - first)
        numbers = values[:, :, token_slice].reshape(-1)
        positions = torch.arange(cuts[0].start, cuts[-1].end, device=device).expand(heads, -1)
        errors = torch.zeros(layers, heads, len(cuts), 2)
        for layer in range(layers):
            exact = keys[layer, :, token_slice].float()
            off = self.rebuilt(layer, torch.arange(heads, device=device), positions) - exact
            error_energy, whole = (x.square().sum(-1).unflatten(1, (len(cuts), -1)).sum(-1) for x in (off, exact))
            errors[layer, ..., 0] = (error_energy / whole.clamp(min=1e-20)).sqrt().cpu()
        size = torch.full(errors.shape[:3], length * dim, dtype=torch.long)
        table = torch.zeros(*size.shape, 4, dtype=torch.long)
        table[..., 0] = torch.arange(heads * len(cuts)).view(heads, -1) * length * dim
        table[..., 1], table[..., 2], table[..., 3] = length, self.tokens.shape[-1], min(length, dim)
        begin = [layer * heads * len(cuts) * length * dim for layer in range(layers + 1)]
        return Packed("factors", numbers, begin, table, size, errors)

    def unpack(self, numbers: Tensor, units: Units) -> tuple[Tensor, Tensor]:
        """Values as they came, and keys from the factors."""
        each = torch.arange(units.tokens * units.dim, device=numbers.device)
        values = numbers[units.table[:, :1] + each].unflatten(1, (units.tokens, units.dim))
        positions = units.start[:, None] + torch.arange(units.tokens, device=numbers.device)
        return self.rebuilt(units.layer, units.kv_heads, positions).to(values.dtype), values
