"""SeerAttention-R against plain formulas in float64: gate keys, the blocks that the gate chooses, its files and its
training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Seen, Trial
from safetensors.torch import save_file
from support import raises_code

from kvlens import methods
from kvlens.engine.models import LoadedModel, load
from kvlens.lab.training.seer.train import SeerTraining, divergence, recall, train_seer
from kvlens.methods.calibration import read_figures, require
from kvlens.methods.naming import preset_name, stand_in
from kvlens.methods.seer.gate import BASE, draw_gate, gate_dim

N, NEW, PAGE = 75, 18, 8
DIM = gate_dim(SHAPE.head_dim)


class Turns:
    """A rotary embedding of pairs (i, i + D / 2), in the place of a model's."""

    def __call__(
        self, keys: torch.Tensor, positions: torch.Tensor, layer: int | None = None, back: bool = False
    ) -> torch.Tensor:
        half = keys.shape[-1] // 2
        angle = positions.double()[:, None] * 0.1 ** torch.arange(half) * (-1 if back else 1)
        cos, sin = angle.cos(), angle.sin()
        low, high = keys.double().split(half, -1)
        return torch.cat((low * cos - high * sin, low * sin + high * cos), -1).float()


def turned(vectors: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, back: bool = False) -> np.ndarray:
    """Vectors [m, d] as complex numbers (i, i + d / 2), turned by position times frequency."""
    half = vectors.shape[-1] // 2
    angle = positions[:, None] * frequencies * (-1 if back else 1)
    numbers = (vectors[:, :half] + 1j * vectors[:, half:]) * np.exp(1j * angle)
    return np.concatenate([numbers.real, numbers.imag], -1)


def logits_of(keys: np.ndarray, q: np.ndarray, layer: int, kv_head: int) -> np.ndarray:
    """The gate's logits (eq. 1-3) of whole blocks of keys [m, D] for queries q [G, D] at position m - 1."""
    gate = draw_gate(SHAPE, 0)
    of_model = 0.1 ** np.arange(SHAPE.head_dim // 2)
    of_gate = BASE ** -(np.arange(DIM // 2) / (DIM // 2))
    places = np.arange(len(keys))
    plain = turned(keys, places, of_model, back=True)
    whole = (len(keys) - 1) // PAGE
    paged = plain[: whole * PAGE].reshape(whole, PAGE, -1)
    pooled = np.concatenate([paged.max(1), paged.min(1), paged.mean(1)], -1)
    gate_key = turned(pooled @ gate.key[layer, kv_head].double().numpy(), places[: whole * PAGE : PAGE], of_gate)
    position = np.full(len(q), len(keys) - 1)
    straight = turned(q, position, of_model, back=True)
    weights = gate.query[layer, kv_head].double().numpy()
    joined = sum(row @ weight for row, weight in zip(straight, weights, strict=True))
    query = turned(joined[None], position[:1], of_gate)[0]
    return gate_key @ query / np.sqrt(DIM)


@pytest.mark.parametrize("settings", [{"tokens": 4 * PAGE}, {"threshold": 0.12}])
def test_a_kv_head_attends_the_blocks_that_its_gate_chooses_and_the_open_one(settings: dict[str, Any]) -> None:
    trial = Trial("seer", N, NEW, rotate=Turns(), page=PAGE, gate="drawn", dense_layers=1, **settings)
    keys = {h: list(trial.keys[1, h]) for h in range(SHAPE.kv_heads)}
    counts = set()

    seen = Seen(trial.session).read
    for step in range(NEW):
        q, k = trial.step(step)
        position, bias = seen[0]
        assert bias is None or bool((bias > -torch.inf).all(1)[position >= 0].all()), "the first layer is dense"
        position, bias = seen[1]
        assert bias is not None
        for kv_head in range(SHAPE.kv_heads):
            keys[kv_head].append(k[1, kv_head])
            group = q[1, kv_head * SHAPE.group : (kv_head + 1) * SHAPE.group]
            logits = logits_of(np.array(keys[kv_head]), group, 1, kv_head)
            shares = np.exp(logits - logits.max())
            shares /= shares.sum()
            if "threshold" in settings:
                blocks = np.flatnonzero(shares > settings["threshold"])
                assert np.abs(shares - settings["threshold"]).min() > 1e-5
            else:
                blocks = np.argsort(-shares, kind="stable")[:3]
            counts.add(len(blocks))
            open_block = range(len(logits) * PAGE, N + step + 1)
            expected = sorted([*(p for b in blocks for p in range(b * PAGE, b * PAGE + PAGE)), *open_block])
            for place in range(SHAPE.group):
                mine = position[kv_head][bias[kv_head, place] > -torch.inf]
                assert sorted(mine.tolist()) == expected, (step, kv_head, place)
    assert len(counts) > 1 if "threshold" in settings else counts == {3}


def test_the_device_counts_gate_keys_and_weights() -> None:
    trial = Trial("seer", N, NEW, rotate=Turns(), page=PAGE, gate="drawn")
    held = trial.session.method.held()
    rows = (N + NEW) // PAGE
    assert held["summaries"][0].shape == (SHAPE.layers, SHAPE.kv_heads, rows, DIM)
    weights = sum(tensor.numel() for tensor in held["gate"][:2])
    assert weights == SHAPE.layers * SHAPE.kv_heads * (SHAPE.group + 3) * SHAPE.head_dim * DIM


def test_a_model_without_rotary_positions_is_refused() -> None:
    with raises_code("no_rotary_positions", model="random"):
        Trial("seer", N, NEW, page=PAGE, gate="drawn")


def test_a_gate_that_nobody_trained_is_called_so_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    method = methods.get("seer")
    assert stand_in("seer", {"gate": "drawn"}) == "untrained gate"
    assert stand_in("seer", {"gate": "trained"}) == ""
    assert preset_name("seer", "fit", {"gate": "drawn"}) == "SeerAttention-R (untrained gate)"
    params = methods.make_parameters(method, None, {"page": 16})
    assert set(method.calibrations[0].shipped) == {"demo", "smollm2"}
    for model in method.calibrations[0].shipped:
        require(method, params, model)
    with pytest.raises(ValueError, match="gate=drawn"):
        require(method, params, "another")
    absent = methods.make_parameters(method, None, {"gate_file": str(tmp_path / "none.safetensors")})
    with raises_code("calibration_missing"):
        require(method, absent, "demo")


def stored(folder: Path, query: torch.Tensor, key: torch.Tensor, page: int = PAGE) -> Path:
    path = folder / "gate.safetensors"
    save_file({"query": query, "key": key}, path)
    path.with_suffix(".json").write_text(json.dumps({"page": page}))
    return path


def test_a_gate_of_another_model_or_block_is_refused(tmp_path: Path) -> None:
    gate = draw_gate(SHAPE, 3)
    method = methods.get("seer")
    path = stored(tmp_path, gate.query, gate.key)

    def figures(page: int) -> Any:
        params = methods.make_parameters(method, None, {"gate_file": str(path), "page": page})
        return read_figures(method, params, SHAPE, "random")["trained gate"]

    assert torch.equal(figures(PAGE).key, gate.key)
    with raises_code("other_block", trained=PAGE, page=2 * PAGE):
        figures(2 * PAGE)
    stored(tmp_path, gate.query[:1], gate.key)
    with raises_code("other_model", file=path.name):
        figures(PAGE)
    save_file({"axes": gate.key}, path)
    with raises_code("other_file", file=path.name):
        figures(PAGE)


def test_the_divergence_and_the_recall_are_those_of_the_formulas() -> None:
    rng = np.random.default_rng(0)
    shares = rng.random((1, 2, 5, 16))
    full = torch.ones(5, 16, dtype=torch.bool)
    full[0, 8:] = False
    shares[..., 0, 8:] = 0
    shares /= shares.sum(-1, keepdims=True)
    logits = np.where(full, rng.standard_normal((1, 2, 5, 16)), -np.inf)
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = np.where(shares > 0, shares * (np.log(shares) - log_softmax), 0).sum(-1).mean()
    both = torch.tensor(logits), torch.tensor(shares)
    np.testing.assert_allclose(float(divergence(*both)), expected, rtol=1e-6)
    hits = []
    for head, row in np.ndindex(2, 5):
        best = [set(np.argsort(-x[0, head, row])[: 1 if row == 0 else 2]) for x in (logits, shares)]
        hits.append(len(best[0] & best[1]) / len(best[0]))
    np.testing.assert_allclose(float(recall(*both, full, 0.125)), np.mean(hits), rtol=1e-6)


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load("demo", "cpu", "float32")


def test_training_lowers_the_loss_of_documents_that_are_held_out(demo: LoadedModel, tmp_path: Path) -> None:
    from kvlens.lab.training.seer.documents import list_documents

    documents, about = list_documents(demo, [])
    settings = SeerTraining(page=PAGE, length=256, queries=48, steps=60)
    out = train_seer(demo, documents[:8], tmp_path / "gate.safetensors", settings, about=about)
    origin = json.loads(out.with_suffix(".json").read_text())
    before, after = origin["held_out"]["untrained"], origin["held_out"]["trained"]
    assert after["loss"] < 0.5 * before["loss"]
    assert after["recall"] > before["recall"]
    assert (origin["page"], origin["documents"]["held_out"], origin["training"]["steps"]) == (PAGE, 1, 60)
    method = methods.get("seer")
    params = methods.make_parameters(method, None, {"gate_file": str(out), "page": PAGE})
    gate = read_figures(method, params, demo.shape, "demo")["trained gate"]
    assert not torch.allclose(gate.key, draw_gate(demo.shape, 0).key, atol=1e-2)
    with raises_code("too_few_documents", documents=1, length=256):
        train_seer(demo, documents[:1], tmp_path / "gate.safetensors", settings)
