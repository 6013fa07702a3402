"""Training of SeKV's router on a tiny random Llama: losses by hand, gradients, the student against plain attention,
resuming."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import raises_code
from transformers import LlamaConfig, LlamaForCausalLM

from kvlens.engine.hf_attention import attending
from kvlens.lab.training.sekv import corpus, losses, routing
from kvlens.lab.training.sekv.examples import draw, prepare
from kvlens.lab.training.sekv.files import load_router
from kvlens.lab.training.sekv.settings import SeKVTraining, settings_of
from kvlens.lab.training.sekv.student import ATTENTION, Pass, RouterModule, mixed_softmax, straight_through
from kvlens.lab.training.sekv.train import train_sekv
from kvlens.lab.training.sekv.trainer import Trainer
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.methods.sekv.router import fit_pca
from kvlens.shape import KVShape

PARAMS = SeKVParameters(window=8, block=8, l_min=4, l_max=10, dim=4, max_rank=4)
SETTINGS = SeKVTraining(
    batch=2, lengths=(48, 64), suffix=12, evaluate_every=4, evaluate_on=2, concentration=0.2, learning_rate=1e-2
)


class Letters:
    """A tokenizer for tests: one token per character."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [3 + ord(c) % 40 for c in text]}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def example_of(model: LlamaForCausalLM, n: int = 64, params: SeKVParameters = PARAMS):  # type: ignore[no-untyped-def]
    ids = torch.randint(3, 48, (n,), generator=torch.Generator().manual_seed(1)).tolist()
    example = prepare(model, ids, SETTINGS.suffix, params)
    assert example is not None
    return ids, example


def trainer_of(model: LlamaForCausalLM, steps: int = 20) -> tuple[Trainer, object]:
    _, example = example_of(model)
    start = fit_pca(example.prefix_keys, 2, PARAMS.dim)
    return Trainer(model, PARAMS, SETTINGS, steps, start), example


def test_coverage_set_by_hand() -> None:
    mass = torch.tensor([[0.05, 0.5, 0.3, 0.15], [0.0, 0.0, 0.2, 0.0]])
    assert losses.coverage_set(mass, 0.9).tolist() == [[False, True, True, True], [False, False, True, False]]
    assert losses.coverage_set(mass, 0.8).tolist()[0] == [False, True, True, False]
    assert losses.mined(mass, 0.8, 2).tolist() == [True, False]
    assert losses.mined(mass, 0.8, 1).tolist() == [False, False]


def test_losses_follow_the_equations() -> None:
    rng = np.random.default_rng(0)
    score, target = rng.standard_normal((2, 3, 4)), rng.random((2, 3, 4)) > 0.6
    p = 1 / (1 + np.exp(-score))
    expected = -(10 * target * np.log(p) + ~target * np.log(1 - p)).mean()
    every = torch.ones(2, 3, dtype=torch.bool)
    got = losses.zoom(torch.tensor(score), torch.tensor(target), every, 10.0)
    assert got.item() == pytest.approx(expected, rel=1e-9)
    assert losses.zoom(torch.tensor(score), torch.tensor(target), ~every, 10.0) == 0
    some = torch.tensor([[True, False, False], [False, False, False]])
    only = -(10 * target * np.log(p) + ~target * np.log(1 - p))[0, 0].sum() / score.size
    assert losses.zoom(torch.tensor(score), torch.tensor(target), some, 10.0).item() == pytest.approx(only, rel=1e-9)

    sigma = (torch.tensor([[2.0, 1.0]]), torch.tensor([[3.0, 1.0]]))
    gates = (torch.tensor([[1.0, 0.5]]), torch.tensor([[0.9, 0.0]]))
    energy = (torch.tensor([5.0]), torch.tensor([10.0]))
    assert losses.reconstruction(gates, sigma, energy).item() == pytest.approx(0.25 / 5 + (0.09 + 1) / 10)
    assert losses.budget(torch.tensor([[1.0, 0.0]]), gates, 0.1).item() == pytest.approx(0.5 + 0.1 * (1.5 + 0.9))

    teacher = torch.tensor([[0.2, 0.8], [0.5, 0.5]]).log()
    assert losses.distillation(teacher, teacher + 7).item() == pytest.approx(0, abs=1e-7)
    other = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    assert losses.distillation(teacher, other).item() == pytest.approx(
        (0.2 * math.log(0.4) + 0.8 * math.log(1.6)) / 2, rel=1e-6
    )


def test_straight_through_is_hard_forward_and_linear_backward() -> None:
    probability = torch.tensor([[[0.2, 0.7]]], requires_grad=True)
    tau = torch.tensor([0.5], requires_grad=True)
    z = straight_through(probability, tau)
    torch.testing.assert_close(z, torch.tensor([[[0.0, 1.0]]]))
    z.sum().backward()
    assert probability.grad is not None
    assert probability.grad.tolist() == [[[1.0, 1.0]]]
    assert tau.grad is not None
    assert tau.grad.item() == -2.0


def test_mixed_softmax_is_softmax_over_what_is_in_use() -> None:
    logits = torch.tensor([3.0, 100.0, -1.0, 0.5])
    use = torch.tensor([1.0, 0.0, 1.0, 1.0], requires_grad=True)
    for exponent in (1.0, 15.0):
        weight = mixed_softmax(logits, use, exponent)
        torch.testing.assert_close(weight[[0, 2, 3]], logits[[0, 2, 3]].softmax(-1))
        assert weight[1] == 0
        (gradient,) = torch.autograd.grad(weight[1], use)
        in_use = (logits[[0, 2, 3]] - 3).exp().sum()
        torch.testing.assert_close(gradient[1], torch.tensor(exponent).exp() / in_use)


def test_student_at_full_resolution_equals_the_model(model: LlamaForCausalLM) -> None:
    params = dataclasses.replace(PARAMS, max_rank=8)
    ids, example = example_of(model, params=params)
    router = RouterModule(fit_pca(example.prefix_keys, 2, params.dim), params.max_rank, tau=-1.0, open_gates=40.0)
    with torch.no_grad(), attending(model, ATTENTION):
        logits = model(
            input_ids=example.suffix_ids,
            position_ids=example.position_ids,
            use_cache=False,
            sekv=Pass(12, example.prefix, router),
        ).logits[0]
    expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -12:]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(example.teacher, expected.log_softmax(-1), atol=1e-4, rtol=1e-4)
    assert model.config._attn_implementation != "kvlens_sekv_training"


def test_span_mass_is_the_teachers_attention(model: LlamaForCausalLM) -> None:
    ids, example = example_of(model)
    model.set_attn_implementation("eager")
    weights = model(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation("sdpa")
    exact_tokens = example.prefix.exact_keys.shape[2]
    in_spans = int(example.prefix.length.sum())
    assert exact_tokens + in_spans == 64 - 12
    keys = example.prefix_keys[0, 0]
    member = torch.ones(52, dtype=torch.bool)
    for row in example.prefix.exact_keys[0, 0]:
        member[(keys - row).abs().sum(-1).argmin()] = False
    for layer in range(2):
        expected = weights[layer][0, :, -12:, :52][:, :, member].sum(-1)
        torch.testing.assert_close(example.mass[layer].sum(-1), expected, atol=1e-5, rtol=1e-4)


def test_gradients_reach_what_is_learned_and_nothing_else(model: LlamaForCausalLM) -> None:
    trainer, example = trainer_of(model)
    with torch.no_grad():
        trainer.module.tau.fill_(0.97)
    trip = Pass(12, example.prefix, trainer.module)
    with attending(model, ATTENTION):
        logits = model(
            input_ids=example.suffix_ids, position_ids=example.position_ids, use_cache=False, sekv=trip
        ).logits[0]
    z = torch.stack(trip.zooms)
    assert 0 < z.mean() < 1, "some spans are expanded, some are not"
    losses.distillation(example.teacher, logits).backward()
    for name, parameter in trainer.module.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, f"{name}: the distillation loss must reach it"
    assert all(parameter.grad is None for parameter in model.parameters()), "the model is frozen"


@pytest.mark.parametrize("part", ["distill", "zoom", "recon", "budget"])
def test_each_loss_falls_when_it_alone_is_trained(model: LlamaForCausalLM, part: str) -> None:
    trainer, example = trainer_of(model)
    with torch.no_grad():
        trainer.module.tau.fill_(0.97)
        trainer.module.gates.net[-1].bias.zero_()
    optimizer = torch.optim.AdamW(trainer.module.parameters(), lr=3e-2)
    mine = losses.mined(example.mass, 0.2, 4)
    assert mine.any()

    def value() -> torch.Tensor:
        trip = Pass(12, example.prefix, trainer.module)
        with attending(model, ATTENTION):
            logits = model(
                input_ids=example.suffix_ids, position_ids=example.position_ids, use_cache=False, sekv=trip
            ).logits[0]
        gates = (torch.stack([g[0] for g in trip.gates]), torch.stack([g[1] for g in trip.gates]))
        if part == "distill":
            return losses.distillation(example.teacher, logits)
        if part == "zoom":
            return losses.zoom(torch.stack(trip.scores), losses.coverage_set(example.mass, 0.9), mine, 10.0)
        if part == "recon":
            sigma = (example.prefix.key_factors[1], example.prefix.value_factors[1])
            return losses.reconstruction(gates, sigma, example.prefix.energy)
        return losses.budget(torch.stack(trip.zooms), gates, 0.1)

    first = value().item()
    for _ in range(12):
        optimizer.zero_grad()
        loss = value()
        loss.backward()
        optimizer.step()
    assert value().item() < 0.95 * first


def test_schedules(model: LlamaForCausalLM) -> None:
    trainer, _ = trainer_of(model, steps=100)
    rates, budgets = [], []
    for step in range(100):
        trainer.step = step
        rates.append(trainer.rate())
        budgets.append(trainer.budget_weight())
    assert rates[9] == pytest.approx(1e-2)
    assert rates.index(max(rates)) in (9, 10)
    assert rates[-1] < 1e-4
    assert budgets[0] == 0
    assert budgets[25] == pytest.approx(0.05)
    assert budgets[50:] == [0.1] * 50


def test_draw_fills_from_further_documents() -> None:
    ids = draw([[1, 2, 3], [4, 5]], 12, random.Random(0))
    assert len(ids) == 12
    assert set(ids) <= {1, 2, 3, 4, 5}


def test_training_writes_a_router_and_resumes_to_the_same_one(model: LlamaForCausalLM, tmp_path: Path) -> None:
    rng = random.Random(3)
    documents = ["".join(rng.choice("abcdefgh ") for _ in range(90)) for _ in range(6)]
    lines: list[dict] = []

    def train(folder: str, steps: int = 8) -> Path:
        return train_sekv(
            model, Letters(), tmp_path / folder, steps, documents, PARAMS, SETTINGS, lines.append, {"model": "tiny"}
        )

    straight = load_router(train("straight"), KVShape(2, 4, 2, 8, 4))
    assert [line["step"] for line in lines] == list(range(1, 9))
    log = [json.loads(line) for line in (tmp_path / "straight/log.jsonl").read_text().splitlines()]
    assert [line["length"] for line in log] == [48] * 4 + [64] * 4
    assert "held_out_loss" in log[3]

    class Interrupted(Exception):
        pass

    def stop(figures: dict) -> None:
        if figures["step"] == 6:
            raise Interrupted

    with pytest.raises(Interrupted):
        train_sekv(model, Letters(), tmp_path / "resumed", 8, documents, PARAMS, SETTINGS, stop, {"model": "tiny"})
    resumed = load_router(train("resumed"), KVShape(2, 4, 2, 8, 4))
    assert len((tmp_path / "resumed/log.jsonl").read_text().splitlines()) == 8
    assert torch.equal(straight.weight, resumed.weight)
    assert torch.equal(straight.threshold, resumed.threshold)
    assert straight.provenance == resumed.provenance
    assert straight.provenance["about"] == {"model": "tiny"}


def test_refuses_documents_without_spans(model: LlamaForCausalLM, tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, lengths=(20,))
    with raises_code("no_span"):
        train_sekv(model, Letters(), tmp_path, 2, ["a" * 60, "b" * 60], PARAMS, settings)
    with pytest.raises(ValueError, match="two documents"):
        train_sekv(model, Letters(), tmp_path, 2, ["a" * 60], PARAMS, settings)


def test_places_that_are_kept_are_drawn_again(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    documents = [[rng.randrange(30) for _ in range(90)] for _ in range(3)]
    settings = dataclasses.replace(SETTINGS, windows=2, lengths=(48,), evaluate_on=3)
    trainer = Trainer(model, PARAMS, settings, 8, torch.randn(2, 4, PARAMS.dim, 8))
    drawn: list[int] = []

    def draw(documents: Any, length: int, rng: random.Random) -> list[int]:
        drawn.append(length)
        return [rng.randrange(30) for _ in range(length)]

    monkeypatch.setattr("kvlens.lab.training.sekv.trainer.draw", draw)
    for _ in range(6):
        trainer.advance(documents)
    first, again = trainer.evaluate(documents), trainer.evaluate(documents)
    assert len(drawn) == 4, "two for training, two others held out"
    assert first == again


def test_where_heads_look_is_scored_as_the_student_scores_it(model: LlamaForCausalLM) -> None:
    ids, example = example_of(model)
    found = routing.looks(model, ids, PARAMS, SETTINGS.suffix, 99)
    assert found is not None
    torch.testing.assert_close(found.mean_keys, example.prefix.mean_keys)
    torch.testing.assert_close(found.mass.float(), example.mass, atol=1e-3, rtol=1e-3)
    start = fit_pca(example.prefix_keys, 2, PARAMS.dim)
    router = RouterModule(start, PARAMS.max_rank, tau=-1.0, open_gates=40.0)
    trip = Pass(SETTINGS.suffix, example.prefix, router)
    with attending(model, ATTENTION):
        model(input_ids=example.suffix_ids, position_ids=example.position_ids, use_cache=False, sekv=trip)
    mine = routing.scores(start, found.query.float(), found.mean_keys, found.length)
    torch.testing.assert_close(mine[0], trip.scores[0], atol=1e-2, rtol=1e-2)


def test_routing_alone_learns_where_heads_look(model: LlamaForCausalLM, tmp_path: Path) -> None:
    rng = random.Random(3)
    documents = ["".join(rng.choice("abcdefgh ") for _ in range(90)) for _ in range(3)]
    settings = dataclasses.replace(
        SETTINGS, routing_steps=60, routing_windows=3, routing_suffix=24, routing_rate=0.05, concentration=0.1
    )
    said: list[dict] = []
    path = train_sekv(model, Letters(), tmp_path, 0, documents, PARAMS, settings, said.append)
    made = load_router(path, KVShape(2, 4, 2, 8, 4))
    assert made.gates is None, "no step trained them"
    assert made.provenance["held_out_loss"] is None, "nothing was evaluated; JSON has no infinity"
    assert said[-1] == {"routing_window": 3, "of": 3}
    ids = [Letters()(text)["input_ids"] for text in documents[:-1]]
    seen = [routing.looks(model, draw(ids, 48, random.Random(f"0/routing/{i}")), PARAMS, 24, 1) for i in range(3)]
    start = fit_pca(example_of(model)[1].prefix_keys, 2, PARAMS.dim)

    def loss(weight: torch.Tensor) -> float:
        each = []
        for one in seen:
            assert one is not None
            score = routing.scores(weight, one.query.float(), one.mean_keys, one.length)
            mass = one.mass.float()
            target, mine = losses.coverage_set(mass, 0.9), losses.mined(mass, 0.1, SETTINGS.strongest)
            each.append(float(losses.zoom(score, target, mine, SETTINGS.w_plus)))
        return sum(each)

    assert loss(made.weight) < 0.9 * loss(start)


def test_settings_by_name() -> None:
    assert settings_of({"lengths": "512,1024", "learning_rate": "0.01"}) == SeKVTraining(
        lengths=(512, 1024), learning_rate=0.01
    )
    with pytest.raises(ValueError, match="no setting 'rate'; it has"):
        settings_of({"rate": "1"})
    with pytest.raises(ValueError, match="--train batch=x: "):
        settings_of({"batch": "x"})
    with raises_code("setting_out_of_range", setting="suffix"):
        settings_of({"suffix": "-3"})
    with raises_code("setting_out_of_range", setting="lengths"):
        settings_of({"lengths": "400", "routing_steps": "5"})


def test_a_book_and_code_when_no_texts_are_given() -> None:
    found = corpus.documents()
    assert len(found) == 2 * corpus.PARTS
    assert "Alice" in found[-2]
    assert "import" in found[-1]
    assert len(corpus.named()) == 1 + len(corpus.MODULES)
