"""ShadowKV against its algorithms written out in float64: outliers, chosen chunks, rebuilt keys, values alone moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Seen, Trial
from support import raises_code
from test_infllm import rotate, turned

from kvlens.methods import make_parameters
from kvlens.methods.shadowkv.method import ShadowKV

N, NEW, CHUNK, LOCAL, OUT, CHOSEN, RANK = 93, 9, 6, 2, 3, 4, 20
SET = {"chunk": CHUNK, "local": LOCAL, "outliers": OUT, "tokens": CHOSEN * CHUNK + 3, "rank": RANK / 48}
END = (N // CHUNK - LOCAL) * CHUNK


@pytest.mark.parametrize("group", ["max", "mean"])
def test_values_of_the_best_chunks_are_fetched_and_their_keys_rebuilt(group: str) -> None:
    trial = Trial("shadowkv", N, NEW, rotate=rotate, group=group, **SET)

    seen = Seen(trial.session).decided
    layer, memory, keys = 1, trial.session.memory, trial.keys[1, :, :END]
    plain = turned(keys, -np.arange(END)).swapaxes(0, 1).reshape(END, -1)
    u, sigma, v = np.linalg.svd(plain, full_matrices=False)
    low = ((u[:, :RANK] * sigma[:RANK]) @ v[:RANK]).reshape(END, SHAPE.kv_heads, -1).swapaxes(0, 1)
    low = turned(low, np.arange(END))
    chunks = keys.reshape(SHAPE.kv_heads, -1, CHUNK, SHAPE.head_dim)
    mean = chunks.mean(2)
    norms = np.linalg.norm(chunks, axis=-1) * np.linalg.norm(mean, axis=-1)[:, :, None]
    odd = np.argsort(((chunks * mean[:, :, None]).sum(-1) / norms).min(-1), -1)[:, :OUT]
    noted = trial.session.method.drain_journal()
    errors = next(note.values for note in noted if (note.name, note.layer) == ("key_error", layer))
    wrong = np.linalg.norm(low - keys, axis=(1, 2)) / np.linalg.norm(keys, axis=(1, 2))
    np.testing.assert_allclose(errors, wrong, atol=1e-4)
    assert (wrong > 0.05).all()
    told = {(r.kv_head, r.span): r for r in memory.log.take_stored() if r.layer == layer}
    first = told[1, 3]
    assert (first.form, first.rank_k, first.cold_bytes) == ("factors", RANK, CHUNK * SHAPE.head_token_bytes // 2)
    assert first.err_k == pytest.approx(
        np.linalg.norm((low - keys)[1, 2 * CHUNK : 3 * CHUNK]) / np.linalg.norm(keys[1, 2 * CHUNK : 3 * CHUNK]),
        abs=1e-4,
    )
    before: list[set[int]] = [set() for _ in odd]
    for step in range(NEW):
        q, _ = trial.step(step)
        bias, selection = seen[layer]
        moved = dict.fromkeys(range(SHAPE.kv_heads), 0)
        for entry in memory.transfers.opened:
            for of, head, _, size in entry.lines():
                moved[head] += size * (of == layer)
        slots = memory.reads.slots(layer, bias)
        for h in range(SHAPE.kv_heads):
            scores = q[layer, h * SHAPE.group : (h + 1) * SHAPE.group] @ mean[h].T / SHAPE.head_dim**0.5
            scores[:, odd[h]] = -np.inf
            shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            shares = shares.max(0) if group == "max" else shares.mean(0)
            best = np.argsort(-shares)[:CHOSEN].tolist()
            assert [span - 1 for span in selection.requested[h].tolist()] == best, (step, h)
            np.testing.assert_allclose(np.nan_to_num(selection.score[h, 1:]), shares, atol=1e-5)
            whole = {p for c in odd[h] for p in range(c * CHUNK, (c + 1) * CHUNK)}
            rebuilt = {p for c in best for p in range(c * CHUNK, (c + 1) * CHUNK)}
            for g in range(SHAPE.group):
                expected = sorted(whole | rebuilt | set(range(END, N + step + 1)))
                assert trial.attended(layer, h * SHAPE.group + g, bias) == expected
            read = bias[h, 0] > -torch.inf
            for p, k, value in zip(slots.position[h][read], slots.keys[h][read], slots.values[h][read], strict=True):
                if p < END:
                    np.testing.assert_allclose(k, (low if int(p) in rebuilt else keys)[h, p], atol=1e-4)
                    np.testing.assert_allclose(value, trial.values[layer, h, p], atol=1e-6)
            there = set(best) - before[h]
            assert moved[h] == len(there) * CHUNK * SHAPE.head_token_bytes // 2, "values alone"
            before[h] = set(best)
    kept = {(e.kv_head, e.span - 1) for e in memory.log.take_events() if e.kind == "kept" and e.layer == layer}
    assert kept == {(h, c) for h, mine in enumerate(odd.tolist()) for c in mine}


def test_what_it_needs_is_said_in_one_sentence() -> None:
    with raises_code("no_rotary_positions"):
        Trial("shadowkv", N, NEW, **SET)
    with pytest.raises(ValueError, match=r"^shadowkv: rank must [^\n]*\.$"):
        make_parameters(ShadowKV, None, {"rank": 0.0})
