"""TurboQuant and bits by layer against quantise-dequantise written out in float64, and the bytes they really hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial
from test_kivi import rounded

from kvlens.kernels.code_bytes import code_bytes
from kvlens.kernels.quantise import pack, unpack
from kvlens.quantised.rotated import RotatedVectors, levels, random_directions

GROUP, RESIDUAL, N, NEW = 8, 16, 75, 40


@pytest.mark.parametrize(
    ("bits", "expected"), [(1, [0.7979]), (2, [0.4528, 1.5104]), (3, [0.2451, 0.7560, 1.3439, 2.1520])]
)
def test_levels_of_many_numbers_are_those_of_a_normal_distribution(bits: int, expected: list[float]) -> None:
    """The levels of Lloyd and Max for a normal distribution, as tables have them."""
    found = np.array(levels(4096, bits)) * 64
    np.testing.assert_allclose(found[2 ** (bits - 1) :], expected, rtol=2e-3)
    np.testing.assert_allclose(found, -found[::-1], atol=1e-9)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_codes_come_back_from_as_many_bytes_as_are_counted(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = pack(codes, bits)
    assert packed.shape[-1] == code_bytes(24, bits) == 24 * bits // 8
    assert (unpack(packed, 24, bits) == codes).all()


def turned(x: np.ndarray, bits: int, turn: np.ndarray, signs: np.ndarray | None) -> np.ndarray:
    """Vectors [n, D] as their codes hold them, Algorithms 1 and 2 written out."""
    size = x.shape[1]
    centres = np.array(levels(size, bits - (signs is not None)))
    lengths = np.linalg.norm(x, axis=1, keepdims=True).astype(np.float16).astype(float)
    y = (x / lengths) @ turn.T
    coded = centres[np.abs(y[..., None] - centres).argmin(-1)]
    if signs is not None:
        rest = y - coded
        length = np.linalg.norm(rest, axis=1, keepdims=True).astype(np.float16).astype(float)
        coded = coded + math.sqrt(math.pi / 2) / size * length * (np.where(rest @ signs.T >= 0, 1, -1) @ signs)
    return coded @ turn * lengths


@pytest.mark.parametrize(("key_bits", "value_bits", "corrected"), [(4, 4, True), (3, 1, True), (2, 3, False)])
def test_every_step_attends_what_turned_codes_hold(key_bits: int, value_bits: int, corrected: bool) -> None:
    settings = {"key_bits": key_bits, "value_bits": value_bits, "corrected": corrected}
    trial = Trial("turboquant", N, NEW, group=GROUP, residual=RESIDUAL, **settings)
    directions = random_directions(SHAPE.head_dim, corrected, 0, torch.device("cpu"))
    turn, signs = (None if part is None else part.double().numpy() for part in directions)
    assert turn is not None
    np.testing.assert_allclose(turn @ turn.T, np.eye(SHAPE.head_dim), atol=1e-6)
    keys, values = (of.astype(np.float32).astype(float) for of in (trial.keys, trial.values))
    for step in range(NEW):
        q, k = trial.step(step)
        new = k[:, :, None].astype(np.float32).astype(float)
        keys, values = (np.concatenate([old, new], 2) for old in (keys, values))
        before = N + step
        exact_keys, exact_values = before - before % RESIDUAL, before - RESIDUAL
        if step % 13:
            continue
        for layer, head in np.ndindex(SHAPE.layers, SHAPE.q_heads):
            kv_head = head // SHAPE.group
            k_all, v_all = keys[layer, kv_head], values[layer, kv_head]
            k_all = np.vstack([turned(k_all[:exact_keys], key_bits, turn, signs), k_all[exact_keys:]])
            v_all = np.vstack([turned(v_all[:exact_values], value_bits, turn, None), v_all[exact_values:]])
            scores = k_all @ q[layer, head] / np.sqrt(SHAPE.head_dim)
            weights = np.exp(scores - scores.max())
            expected = weights @ v_all / weights.sum()
            np.testing.assert_allclose(trial.outs[layer][0, head, 0], expected, atol=2e-3)


def test_the_correction_makes_inner_products_right_on_average() -> None:
    """Two bits a number: without a correction products come out too small, with one they do not."""
    rng, size = np.random.default_rng(0), 32
    keys = torch.tensor(rng.standard_normal((1, 400, size)), dtype=torch.float32)
    ratio = {}
    for corrected in (False, True):
        parts = []
        for seed in range(40):
            turn, signs = random_directions(size, corrected, seed, torch.device("cpu"))
            store = RotatedVectors([2], 1, [400], turn, signs, torch.float32)
            store.put(0, slice(None), 0, keys)
            restored = store.get(0, slice(None), 400)
            parts.append(float((restored * keys).sum() / keys.square().sum()))
        ratio[corrected] = np.mean(parts)
    assert ratio[False] == pytest.approx(1 - 0.117, abs=0.02), "the distortion of two bits, 0.117"
    assert ratio[True] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("turboquant", {"key_bits": 3}),
        ("turboquant", {"corrected": False, "value_bits": 1}),
        ("layerbits", {"layers": "1:3/8"}),
        ("layerbits", {"keys": 8, "values": 1}),
    ],
)
def test_the_bytes_held_are_those_of_the_layout(name: str, settings: dict[str, object]) -> None:
    memory = Trial(name, N, NEW, group=GROUP, residual=RESIDUAL, **settings).session.memory
    assert memory.packed is not None
    tensors = (*memory.hot.tensors(), *memory.packed.tensors(), *memory.spans.tensors())
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert memory.layout.bytes(SHAPE) == held == memory.account.resident


def test_bits_by_layer_hold_each_layer_in_its_own() -> None:
    trial = Trial("layerbits", N, NEW, group=GROUP, residual=RESIDUAL, keys=4, values=2, layers="1:8/3")
    keys, values = (of.astype(np.float32).astype(float) for of in (trial.keys, trial.values))
    q, k = trial.step(0)
    new = k[:, :, None].astype(np.float32).astype(float)
    keys, values = (np.concatenate([old, new], 2) for old in (keys, values))
    until = N - N % RESIDUAL
    for layer, (key_bits, value_bits) in enumerate([(4, 2), (8, 3)]):
        for head in range(SHAPE.q_heads):
            kv_head = head // SHAPE.group
            k_all, v_all = keys[layer, kv_head], values[layer, kv_head]
            k_all = np.vstack([rounded(k_all[:until], key_bits, 0), k_all[until:]])
            v_all = np.vstack([rounded(v_all[: N - RESIDUAL], value_bits, 1), v_all[N - RESIDUAL :]])
            scores = k_all @ q[layer, head] / np.sqrt(SHAPE.head_dim)
            weights = np.exp(scores - scores.max())
            expected = weights @ v_all / weights.sum()
            np.testing.assert_allclose(trial.outs[layer][0, head, 0], expected, atol=2e-3)


def test_two_bits_in_every_layer_are_kivi() -> None:
    places = {"group": GROUP, "residual": RESIDUAL}
    one, other = Trial("layerbits", N, NEW, keys=2, values=2, **places), Trial("kivi", N, NEW, bits=2, **places)
    for step in range(20):
        one.step(step)
        other.step(step)
        for layer in range(SHAPE.layers):
            assert torch.equal(one.outs[layer], other.outs[layer])


@pytest.mark.parametrize("layers", ["0", "0:5/2", "1-0:4/4", "x:2/2", "7:2/2"])
def test_layers_that_cannot_be_are_refused(layers: str) -> None:
    with pytest.raises(ValueError, match="layers"):
        Trial("layerbits", N, NEW, group=GROUP, residual=RESIDUAL, layers=layers)
