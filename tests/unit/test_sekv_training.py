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
from sekv_training_reference import curve, mixed_softmax
from sekv_training_reference import loss as reference_loss
from support import raises_code
from transformers import LlamaConfig, LlamaForCausalLM

from kvlens.engine.hf_attention import attending
from kvlens.lab.training.sekv import corpus, losses, routing
from kvlens.lab.training.sekv.batch import join
from kvlens.lab.training.sekv.examples import Example, draw, prepare, read
from kvlens.lab.training.sekv.files import load_router
from kvlens.lab.training.sekv.mixing import Entries, MixedAttention
from kvlens.lab.training.sekv.seam import ATTENTION
from kvlens.lab.training.sekv.settings import SeKVTraining, settings_of
from kvlens.lab.training.sekv.student import Pass, RouterModule, straight_through
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


def example_of(model: LlamaForCausalLM, n: int = 64, params: SeKVParameters = PARAMS) -> tuple[list[int], Example]:
    ids = torch.randint(3, 48, (n,), generator=torch.Generator().manual_seed(1)).tolist()
    example = prepare(model, ids, SETTINGS.suffix, params)
    assert example is not None
    return ids, example


def start_of(model: LlamaForCausalLM, params: SeKVParameters = PARAMS) -> torch.Tensor:
    ids, _ = example_of(model)
    found = read(model, ids, SETTINGS.suffix, params)
    assert found is not None
    return fit_pca(found.keys, 2, params.dim)


def trainer_of(model: LlamaForCausalLM, steps: int = 20) -> tuple[Trainer, Example]:
    return Trainer(model, PARAMS, SETTINGS, steps, start_of(model)), example_of(model)[1]


def student(model: LlamaForCausalLM, examples: list[Example], router: RouterModule) -> tuple[torch.Tensor, Pass]:
    batch = join(examples)
    trip = Pass(batch, router)
    with attending(model, ATTENTION):
        logits = model(input_ids=batch.suffix_ids, position_ids=batch.position_ids, use_cache=False, sekv=trip).logits
    return logits, trip


def documents_of(count: int, tokens: int = 150) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 48) for _ in range(tokens)] for _ in range(count)]


def test_a_batch_costs_what_its_documents_cost_one_by_one(model: LlamaForCausalLM) -> None:
    examples = [prepare(model, ids[:64], SETTINGS.suffix, PARAMS, cap) for cap, ids in enumerate(documents_of(3), 1)]
    chosen = [example for example in examples if example is not None]
    assert len({example.mass.shape[-1] for example in chosen}) > 1, "documents differ in their number of spans"
    assert len({example.prefix.exact_keys.shape[2] for example in chosen}) > 1
    trainer, _ = trainer_of(model)
    with torch.no_grad():
        trainer.module.tau.fill_(0.95)
    whole, _ = trainer.loss(chosen, 0.07)
    whole.sum().backward()
    batched = [parameter.grad for parameter in trainer.module.parameters()]
    trainer.module.zero_grad(set_to_none=True)
    each = [reference_loss(model, example, trainer.module, SETTINGS, 0.07) for example in chosen]
    sum(each).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(whole, torch.stack(each), atol=1e-5, rtol=1e-5)
    for mine, parameter in zip(batched, trainer.module.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(mine, parameter.grad, atol=1e-4 * float(parameter.grad.abs().max()), rtol=1e-3)


def test_loss_curve_equals_that_of_one_document_after_the_other(model: LlamaForCausalLM) -> None:
    documents, settings = documents_of(4), dataclasses.replace(SETTINGS, batch=3)
    trainer = Trainer(model, PARAMS, settings, 6, start_of(model))
    mine = [trainer.advance(documents)["loss"] for _ in range(6)]
    assert mine == pytest.approx(curve(model, documents, PARAMS, settings, 6, start_of(model)), abs=1e-5)


def test_the_frozen_model_reads_a_kept_place_once(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []
    forward = model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        sizes.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", counting)
    monkeypatch.setattr("kvlens.lab.training.sekv.windows.TOKENS_AT_ONCE", 200)
    settings = dataclasses.replace(SETTINGS, batch=4, lengths=(48,), kept_tokens=48 * 9)
    trainer = Trainer(model, PARAMS, settings, 5, start_of(model))
    sizes.clear()
    for _ in range(5):
        trainer.advance(documents_of(4))
    teacher = [(4, 48), (4, 48), (1, 48)]
    assert sizes == [*teacher, *[(4, SETTINGS.suffix)] * 5], "9 places once, and one student's pass a step"


def test_a_document_adds_masks_to_a_step_and_no_layers(model: LlamaForCausalLM) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    def operations(documents: int) -> int:
        trainer, example = trainer_of(model)
        with Counter() as counter:
            trainer.loss([example] * documents, 0.1)[0].sum().backward()
        return counter.count

    assert operations(8) - operations(2) < 6 * 12, "one by one a document is some 600 operations"


def test_coverage_set_by_hand() -> None:
    mass = torch.tensor([[0.05, 0.5, 0.3, 0.15], [0.0, 0.0, 0.2, 0.0]])
    assert losses.coverage_set(mass, 0.9).tolist() == [[False, True, True, True], [False, False, True, False]]
    assert losses.coverage_set(mass, 0.8).tolist()[0] == [False, True, True, False]
    assert losses.mined(mass, 0.8, 2).tolist() == [True, False]
    assert losses.mined(mass, 0.8, 1).tolist() == [False, False]


def test_losses_follow_the_equations() -> None:
    rng = np.random.default_rng(0)
    score, target = rng.standard_normal((1, 2, 2, 3, 4)), rng.random((1, 2, 2, 3, 4)) > 0.6
    is_span = torch.tensor([[True] * 4, [True] * 3 + [False]])
    each = -(10 * target * np.log(1 / (1 + np.exp(-score))) + ~target * np.log(1 / (1 + np.exp(score))))

    def zoom(rows: torch.Tensor) -> list[float]:
        result: list[float] = losses.zoom(torch.tensor(score), torch.tensor(target), rows, is_span, 10.0).tolist()
        return result

    every = torch.ones(1, 2, 2, 3, dtype=torch.bool)
    assert zoom(every) == pytest.approx([each[0, 0].mean(), each[0, 1, :, :, :3].mean()], rel=1e-9)
    assert zoom(~every) == [0, 0]
    some = ~every
    some[0, :, 0, 0] = True
    assert zoom(some) == pytest.approx([each[0, 0, 0, 0].sum() / 24, each[0, 1, 0, 0, :3].sum() / 18], rel=1e-9)

    one, padded = torch.tensor([[True]]), torch.tensor([[True, False]])
    sigma = tuple(torch.tensor(x).view(1, 1, 1, 1, 2) for x in ([2.0, 1.0], [3.0, 1.0]))
    gates = tuple(torch.tensor(x).view(1, 1, 1, 1, 2) for x in ([1.0, 0.5], [0.9, 0.0]))
    energy = tuple(torch.tensor(x).view(1, 1, 1, 1) for x in (5.0, 10.0))
    assert losses.reconstruction(gates, sigma, energy, one).item() == pytest.approx(0.25 / 5 + (0.09 + 1) / 10)  # type: ignore[arg-type]
    z = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2, 1)
    assert losses.budget(z, gates, 0.1, one, torch.tensor([[True, True]])).item() == pytest.approx(0.5 + 0.1 * 2.4)  # type: ignore[arg-type]
    assert losses.budget(z, gates, 0.1, one, padded).item() == pytest.approx(0.5 + 0.1 * 1.9)  # type: ignore[arg-type]
    both = tuple(torch.cat((x, x * 7), 3) for x in gates)
    more = torch.cat((z, z + 5), -1)
    assert losses.budget(more, both, 0.1, padded, padded).item() == pytest.approx(0.5 + 0.1 * 1.9)  # type: ignore[arg-type]

    teacher = torch.tensor([[[0.2, 0.8], [0.5, 0.5]]]).log()
    assert losses.distillation(teacher, teacher + 7).tolist() == pytest.approx([0], abs=1e-7)
    other = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]).log()
    expected = (0.2 * math.log(0.4) + 0.8 * math.log(1.6)) / 2
    assert losses.distillation(teacher, other).tolist() == pytest.approx([expected], rel=1e-6)


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


def test_mixed_attention_has_the_gradients_of_its_equation() -> None:
    torch.manual_seed(0)
    owner = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 2, 2]])
    entries, exponent, n = Entries(exact=2, spans=3, owner=owner), 2.0, 2 + 3 + 6 + 5
    query, keys, values = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 2, 3, 5, 4), (2, 2, n, 4), (2, 2, n, 4))
    )
    z = (torch.rand(2, 2, 3, 5, 3, dtype=torch.float64) > 0.5).double().requires_grad_()
    bias = torch.zeros(2, 1, 1, 5, n, dtype=torch.float64)
    bias[1, ..., entries.fine][..., 5:] = -math.inf
    bias[..., entries.suffix] = torch.full((5, 5), -math.inf, dtype=torch.float64).triu(1)
    inputs, direction = (query, keys, values, z), torch.randn(2, 2, 3, 5, 4, dtype=torch.float64)

    logits = torch.einsum("bhgtd,bhnd->bhgtn", query, keys) + bias
    fine = torch.stack([z[i, ..., owner[i]] for i in range(2)])
    use = torch.cat((torch.ones_like(z[..., :2]), 1 - z, fine, torch.ones(2, 2, 3, 5, 5)), -1)
    expected = torch.einsum("bhgtn,bhnd->bhgtd", mixed_softmax(logits, use, exponent), values)
    got = MixedAttention.apply(query, keys, values, z, bias, entries, exponent)
    torch.testing.assert_close(got, expected)
    mine, theirs = (torch.autograd.grad((out * direction).sum(), inputs) for out in (got, expected))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_student_at_full_resolution_equals_the_model(model: LlamaForCausalLM) -> None:
    params = dataclasses.replace(PARAMS, max_rank=8)
    ids, example = example_of(model, params=params)
    router = RouterModule(start_of(model, params), params.max_rank, tau=-1.0, open_gates=40.0)
    with torch.no_grad():
        logits = student(model, [example], router)[0][0]
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
    found = read(model, ids, SETTINGS.suffix, PARAMS)
    assert found is not None
    keys = found.keys[0, 0, :52]
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
    logits, trip = student(model, [example], trainer.module)
    z = torch.stack(trip.zooms)
    assert 0 < z.mean() < 1, "some spans are expanded, some are not"
    losses.distillation(example.teacher[None], logits).sum().backward()
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
    assert losses.mined(example.mass, 0.2, 4).any()
    trainer.settings = dataclasses.replace(
        SETTINGS, lambda_zoom=float(part == "zoom"), lambda_recon=float(part == "recon")
    )

    def value() -> tuple[torch.Tensor, torch.Tensor]:
        whole, figures = trainer.loss([example], float(part == "budget"))
        return whole.sum(), figures[part].sum()

    first = value()[1].item()
    for _ in range(12):
        optimizer.zero_grad()
        loss, _ = value()
        loss.backward()
        optimizer.step()
    assert value()[1].item() < 0.95 * first


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
    timeless = {"seconds": 0.0, "date": ""}
    assert straight.provenance | timeless == resumed.provenance | timeless
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
    settings = dataclasses.replace(SETTINGS, kept_tokens=100, lengths=(48,), evaluate_on=2)
    trainer = Trainer(model, PARAMS, settings, 8, torch.randn(2, 4, PARAMS.dim, 8))
    drawn: list[int] = []

    def draw(documents: Any, length: int, rng: random.Random) -> list[int]:
        drawn.append(length)
        return [rng.randrange(30) for _ in range(length)]

    monkeypatch.setattr("kvlens.lab.training.sekv.windows.draw", draw)
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
    start = start_of(model)
    _, trip = student(model, [example], RouterModule(start, PARAMS.max_rank, tau=-1.0, open_gates=40.0))
    mine = routing.scores(start, found.query.float(), found.mean_keys, found.length)
    torch.testing.assert_close(mine[0], trip.scores[0][0], atol=1e-2, rtol=1e-2)


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
    start = start_of(model)

    def loss(weight: torch.Tensor) -> float:
        each = []
        for one in seen:
            assert one is not None
            score = routing.scores(weight, one.query.float(), one.mean_keys, one.length)
            mass = one.mass.float()
            each.append(float(routing.zoom_loss(score, mass, settings)))
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
