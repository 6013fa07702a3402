"""SeKV's codec packs many spans at once as it would pack each alone, and what lies in the cold tier comes back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lowrank_unit import compress, pack

from kvlens.kernels import lowrank
from kvlens.link.codec import Cut, Units
from kvlens.methods.sekv import codec as codecs
from kvlens.methods.sekv.codec import SpanCodec
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.rows import SpanRow
from kvlens.shape import KVShape
from kvlens.tiers.cold import ColdTier
from kvlens.tiers.layout import Layout, Zones
from kvlens.tiers.slots import SpanTable

LAYERS, HEADS, DIM, FIRST = 3, 2, 16, 5
NONE = torch.zeros(LAYERS, HEADS, dtype=torch.bool)
"""KV heads that keep every token"""
CUTS = [Cut(4, 5, 12), Cut(5, 12, 36), Cut(7, 40, 47), Cut(8, 47, 48), Cut(9, 50, 74)]


def kv(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Keys and values [2, L, H_kv, m, D] of falling spectra."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, LAYERS, HEADS, 80, 5, generator=g) @ torch.randn(2, LAYERS, HEADS, 5, DIM, generator=g)
    return (x + 0.1 * torch.randn(x.shape, generator=g)).to(dtype)


def packed(form: str, dtype: torch.dtype = torch.float32) -> tuple[SpanCodec, codecs.Packed]:
    summaries = {cut.span: torch.zeros(LAYERS, HEADS, 4) for cut in CUTS}
    told: list[int] = []
    codec = SpanCodec(SeKVParameters(form=form), None, summaries, None, lambda ids, figures: told.extend(ids), NONE)
    keys, values = kv(dtype)
    made = codec.pack(keys, values, FIRST, CUTS)
    assert made is not None
    assert told == [cut.span for cut in CUTS]
    assert not summaries
    return codec, made


@pytest.mark.parametrize("together", [1, 1 << 24])
@pytest.mark.parametrize("form", ["factors", "smaller"])
def test_a_batch_is_its_spans_one_by_one(form: str, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "TOGETHER", together)
    _, made = packed(form)
    keys, values = kv()
    raw = 0
    for layer in range(LAYERS):
        for head in range(HEADS):
            for place, cut in enumerate(CUTS):
                pair = []
                for x in (keys, values):
                    one = x[layer, head, cut.start - FIRST : cut.end - FIRST]
                    u, sigma, v = lowrank.truncated_svd(one, 32)
                    gates = lowrank.energy_gates(sigma, one.square().sum(), 0.95)
                    pair.append((one, compress(sigma, gates, u, v, 0.05)))
                flat = pack(*(factors for _, factors in pair))
                size = int(made.size[layer, head, place])
                start, *shape = made.table[layer, head, place].tolist()
                if form == "smaller" and flat.numel() >= 2 * pair[0][0].numel():
                    assert (size, start, *shape) == (0, 0, 0, 0, 0)
                    assert made.errors[layer, head, place].isnan().all()
                    raw += 1
                    continue
                assert shape == [cut.end - cut.start, pair[0][1].rank, pair[1][1].rank]
                found = made.numbers[made.begin[layer] + start : made.begin[layer] + start + size]
                torch.testing.assert_close(found, flat, atol=1e-5, rtol=1e-4)
                for error, (one, factors) in zip(made.errors[layer, head, place], pair, strict=True):
                    assert float(error) == pytest.approx(float(lowrank.relative_error(one, factors.dense())), abs=1e-6)
    assert made.begin[-1] == made.numbers.numel() == int(made.size.sum())
    assert (raw > 0) == (form == "smaller")


@pytest.mark.parametrize("form", ["factors", "smaller"])
def test_what_the_tier_holds_is_what_was_put_there(form: str) -> None:
    """Units of both forms: bytes, places, and what they unpack to."""
    codec, made = packed(form)
    keys, values = kv()
    shape = KVShape(LAYERS, 4, HEADS, DIM, 4)
    spans = SpanTable(12, torch.device("cpu"))
    ranges = {cut.span: (cut.start, cut.end) for cut in CUTS}
    spans.add([SpanRow(0, "span", *ranges.get(i, (0, 1)), -1, "") for i in range(10)])
    cold = ColdTier(shape, Layout(Zones(0, 0, 30, 0), 12), spans, torch.float32, 90)
    moves, stored = cold.put(CUTS, made, keys, values, FIRST)
    for move in moves:
        move.run()
    assert sum(move.bytes for move in moves) == cold.bytes == int(stored.size.sum())
    for layer in range(LAYERS):
        for place, cut in enumerate(CUTS):
            here = slice(cut.start - FIRST, cut.end - FIRST)
            for head in range(HEADS):
                unit = cold.unit(layer, cut.span, head)
                assert unit.nbytes == stored.size[place, layer, head] == cold.size[layer, head, cut.span]
                exact = torch.stack((keys[layer, head, here], values[layer, head, here]))
                if not cold.packed(layer, np.array([head]), np.array([cut.span]))[0]:
                    assert torch.equal(unit, exact)
                    continue
                table = cold.table[layer, head, cut.span].clone()
                table[0] = 0
                units = Units(table[None], torch.tensor([cut.start]), layer, 24, DIM, torch.zeros(1))
                found = torch.cat(codec.unpack(unit, units))[:, : cut.end - cut.start]
                for side in range(2):
                    error = lowrank.relative_error(exact[side], found[side])
                    assert float(error) == pytest.approx(float(made.errors[layer, head, place, side]), abs=1e-6)
