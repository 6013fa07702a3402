"""SentKVCompress on real memory tiers: by hand, against the NumPy reference over several steps, at its limits, within
its budget."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import sentkv_reference as reference
import torch

from kvlens.budget import BudgetInfeasible
from kvlens.engine.session import Session
from kvlens.methods.parameters import make_parameters
from kvlens.methods.run_inputs import RunContext, StepEnd
from kvlens.methods.sentkv.method import SentKVCompress
from kvlens.methods.sentkv.params import SentKVParameters
from kvlens.shape import KVShape
from kvlens.spans.sentences import cut_by

SHAPE = KVShape(layers=2, q_heads=4, kv_heads=2, head_dim=8, itemsize=4)
PARAMS = SentKVParameters(length=6, deviation=3, marks="full")
WORDS = ["a", " b", "c ", " d", "e", "f", " g", ".", ",", "? ", "\n", "x;"]


class Trial:
    """A session driven by hand, one random token at a time, with its own record of all keys and values."""

    def __init__(
        self,
        params: SentKVParameters,
        n: int,
        shape: KVShape = SHAPE,
        budget: int | None = None,
        max_new: int = 4,
        seed: int = 0,
        words: list[str] | None = None,
    ):
        rng = np.random.default_rng(seed)
        self.rng, self.shape, self.n = rng, shape, n
        self.words = words or [str(word) for word in rng.choice(WORDS, n + max_new + 1)]
        context = RunContext(
            shape,
            n,
            max_new,
            budget,
            shape.full_kv_bytes(n + 1 + max_new),
            seed,
            "tiny",
            torch.float32,
            torch.device("cpu"),
            tuple(self.words[: n + 1]),
        )
        self.session = Session(SentKVCompress, params, context)
        self.keys, self.values = rng.standard_normal((2, shape.layers, shape.kv_heads, n, shape.head_dim))
        self.drift = rng.standard_normal((shape.layers, shape.q_heads, shape.head_dim))

    def prefill(self) -> Trial:
        for layer in range(self.shape.layers):
            self.session.write(layer, tensor(self.keys[layer]), tensor(self.values[layer]))
        self.session.finish_prefill(torch.zeros(self.n))
        return self

    def step(self, step: int, q: np.ndarray | None = None) -> torch.Tensor:
        """One decode step of random tokens -> outputs [L, H, D]; sets `q`, `k`, `v` to what went in. Queries drift
        slowly."""
        shape, rng = self.shape, self.rng
        last = None if step == 0 else StepEnd(step - 1, self.n + step - 1, 0.0, 0.0, text=self.words[self.n + step - 1])
        self.session.begin_step(step, last)
        self.k, self.v = rng.standard_normal((2, shape.layers, shape.kv_heads, shape.head_dim))
        self.drift = self.drift + 0.4 * rng.standard_normal(self.drift.shape)
        self.q = self.drift.copy() if q is None else q
        out = []
        self.selections = []
        select = self.session.method.select
        for layer in range(shape.layers):
            self.session.write(layer, tensor(self.k[layer])[:, None], tensor(self.v[layer])[:, None])
            self.selections.append(select(layer, tensor(self.q[layer])))
            out.append(self.session.attend(layer, tensor(self.q[layer])[None, :, None], shape.head_dim**-0.5)[0, :, 0])
        return torch.stack(out)

    def read(self, layer: int) -> list[list[set[int]]]:
        """Tokens of closed chunks each query head attends, [KV head][query head]: what the bias lets through."""
        memory, method = self.session.memory, self.session.method
        slots = memory.hot.slots(layer)
        bias = memory.reads.bias(layer, method.select(layer, tensor(self.q[layer])))[0]
        assert bias is not None
        pool = memory.hot.pool(layer)
        at = slice(pool.start["recall"], pool.start["recall"] + pool.zones.recall)
        live = torch.isfinite(bias[:, :, at])
        return [
            [{int(p) for p in slots.position[g, at][live[g, i]]} for i in range(self.shape.group)]
            for g in range(self.shape.kv_heads)
        ]

    def spans(self) -> list[tuple[int, int]]:
        return [(r.tok_start, r.tok_end) for r in self.session.memory.spans.rows[1:]]


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


def test_small_case_worked_out_by_hand() -> None:
    """One layer, one head, D = 2, L = 4, Delta = 2, one sink, 12 prompt tokens in memory (the 13th is fed at step 0).

    Text after the sink: 1 b, 2 c, 3 '.', 4 d, 5 ',', 6 e, 7 f, 8 g, 9 h, 10 '!', 11 i.
    From 1: ideal end 5; splits 3..7; after '.': 0.7 + 0.3 * (1 - 1/2) = 0.85; after ',': 0.28 + 0.15 = 0.43. Chunk A =
    1..3. From 4: ideal end 8; splits 6..10; after ',': 0.28 + 0 = 0.28, the only one. Chunk B = 4..5. From 6: ideal end
    10; splits 8..12; after '!': 0.7 + 0.15. Chunk C = 6..10. Token 11 is open.

    usage 0.69 of 13 tokens = 8.97 -> 9 tokens. Step 0: sink 1, open 2 (11, 12), so 6 of closed chunks.
    q = (2, -1): A has M = (1, 2), m = (0, 0): 2 + 0 = 2; B M = (3, 4), m = (2, 3): 6 - 3 = 3; C M = (1, -1), m = (-1,
    -2): 2 + 2 = 4. So C whole (5 tokens) and one token of B: 4. Step 1: open 3, so 5: C, all of them reused, nothing
    moves. The token of step 1 is '.': the open chunk 11..13 has 3 >= L - Delta tokens and closes as D. Its keys are (0,
    0): 0. Step 2, q = (0, 1): A 2, B 4, C -1, D 0. Open 1, so 7 tokens: B (2), A (3), D (2 of 3: 11, 12). B's first
    token may be here still.
    """
    shape = KVShape(1, 1, 1, 2, 4)
    params = SentKVParameters(length=4, deviation=2, marks="full", sinks=1, usage=0.69)
    words = ["a", "b", "c", ".", "d", ",", "e", "f", "g", "h", "!", "i", "j", ".", "k", "l"]
    trial = Trial(params, 12, shape, max_new=4, words=words)
    trial.keys[0, 0] = [
        [9, 9],
        [1, 0],
        [0, 2],
        [1, 1],
        [3, 3],
        [2, 4],
        [-1, -1],
        [1, -2],
        [-1, -1],
        [-1, -1],
        [0, -1],
        [0, 0],
    ]
    trial.prefill()
    assert trial.spans() == [(0, 1), (1, 4), (4, 6), (6, 11)]
    reasons = [row.reason for row in trial.session.memory.spans.rows[2:]]
    assert [(cut_by(reason), re.findall(r"\d+(?:\.\d+)?", reason)) for reason in reasons] == [
        ("at .", ["1", "1", "0.85"]),  # weight, tokens from the ideal end, score
        ("at ,", ["0.4", "2", "0.28"]),
        ("at !", ["1", "1", "0.85"]),
    ]
    method, counts = trial.session.method, trial.session.memory.host.recaller
    trial.step(0, q=np.array([[[2.0, -1.0]]]))
    selection = trial.selections[0]
    torch.testing.assert_close(selection.score[0, 2:5], torch.tensor([2.0, 3.0, 4.0]))
    assert selection.requested[0, :2].tolist() == [4, 3]
    assert trial.read(0) == [[{4, 6, 7, 8, 9, 10}]]
    assert counts.counts["recalled_tokens"].item() == 6
    (entry,) = trial.session.memory.transfers.opened
    assert entry.sizes.tolist() == [5 * 16, 16]
    budget = next(note.values for note in method.drain_journal() if note.name == "token_budget")
    assert budget.tolist() == [9, 1, 2, 6]
    trial.step(1, q=np.array([[[2.0, -1.0]]]))
    assert trial.read(0) == [[{6, 7, 8, 9, 10}]]
    assert (
        counts.counts["recalled_tokens"].item(),
        counts.counts["reused_tokens"].item(),
        counts.counts["ideal_bytes"].item(),
    ) == (0, 5, 0)
    trial.k[:] = 0
    trial.session.memory.hot.slots(0).keys[0, trial.session.memory.hot.pool(0).window_slots(11, 14)] = 0
    trial.step(2, q=np.array([[[0.0, 1.0]]]))
    assert trial.spans()[-1] == (11, 14)
    last = trial.session.memory.spans.rows[-1].reason
    assert (cut_by(last), re.findall(r"\d+", last)) == ("at .", ["1", "1"])
    torch.testing.assert_close(trial.selections[0].score[0, 2:6], torch.tensor([2.0, 4.0, -1.0, 0.0]))
    assert trial.read(0) == [[{4, 5, 1, 2, 3, 11, 12}]]
    trial.session.close()


CASES = [
    {},
    {"group": "mean"},
    {"group": "native"},
    {"group": "mean", "score_scale": "one"},
    {"literal": True},
    {"marks": "one"},
    {"marks": "none"},
    {"usage": 0.4},
    {"usage": 0.4, "of": "current"},
    {"usage": 0.3, "group": "native"},
    {"sinks": 0},
    {"truncate": False},
    {"length": 9, "deviation": 4, "marks": "mid"},
]


@pytest.mark.parametrize("change", CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_decoding_equals_the_reference(change: dict[str, Any], seed: int) -> None:
    params = dataclasses.replace(PARAMS, **change)
    n, new = 70 + 13 * seed, 16
    budget = None if params.usage else int(0.72 * SHAPE.full_kv_bytes(n + 1 + new))
    trial = Trial(params, n, budget=budget, max_new=new, seed=seed).prefill()
    plan, recall = trial.session.method._plan, trial.session.method._recall
    readers = SHAPE.group if params.group == "native" else 1
    settings = reference.Settings(
        params.length,
        params.deviation,
        params.sinks,
        params.marks,
        params.literal,
        params.group,
        params.score_scale == "sqrt",
        params.usage,
        params.of,
        recall // readers,
    )
    assert recall < plan.selectable, "the case must be one in which not all tokens fit"
    models = [
        reference.Reference(
            settings, trial.words[:n], *([list(x[layer].swapaxes(0, 1)) for x in (trial.keys, trial.values)])
        )
        for layer in range(SHAPE.layers)
    ]
    truncated = 0
    for step in range(new):
        out = trial.step(step)
        counts = trial.session.memory.host.recaller.counts
        for layer, model in enumerate(models):
            if step:
                model.end(trial.words[n + step - 1])
            chosen, expected, wanted, reusable = model.step(trial.k[layer], trial.v[layer], trial.q[layer])
            assert trial.read(layer) == chosen
            closed = len(trial.spans()) - bool(params.sinks)
            assert trial.selections[layer].index_bytes == closed * 2 * SHAPE.head_dim * SHAPE.itemsize
            np.testing.assert_allclose(out[layer].numpy(), expected, atol=1e-5)
            moved, reused = counts["recalled_tokens"][layer], counts["reused_tokens"][layer]
            assert (moved + reused).tolist() == wanted
            if (
                params.usage or params.group == "native"
            ):  # slots that this step does not need keep tokens of earlier steps
                assert (reused >= (min(reusable) if params.truncate else np.array(reusable))).all()
                continue
            assert reused.tolist() == ([min(reusable)] * 2 if params.truncate else reusable)
            if params.truncate:
                ideal = (np.array(wanted) - reusable) * SHAPE.head_token_bytes
                assert counts["ideal_bytes"][layer].tolist() == ideal.tolist()
            else:
                assert np.isnan(counts["ideal_bytes"]).all()
            truncated += reusable[0] != reusable[1]
        assert trial.spans()[bool(params.sinks) :] == models[0].chunks
    if not params.usage and params.group != "native":
        assert truncated > 5
    assert len(models[0].chunks) > len(reference.split(trial.words[:n], params.sinks, settings)) - 1, (
        "a chunk closed while decoding"
    )
    if budget is not None:
        assert trial.session.memory.account.peak <= budget
    trial.session.close()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"group": "native"},
        {"literal": True},
        {"usage": 0.3},
        {"usage": 0.3, "of": "current", "group": "native"},
        {"dense_layers": 1},
        {"dense_layers": 2},
        {"length_control": False},
        {"marks": "none"},
        {"sinks": 0},
        {"length": 3, "deviation": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("new", [1, 2, 40])
def test_the_budget_holds_while_chunks_close(change: dict[str, Any], new: int) -> None:
    """The account refuses to pass the limit; here it is reached at the smallest feasible budget, one byte less is
    refused."""
    params = dataclasses.replace(PARAMS, **change)
    with pytest.raises(BudgetInfeasible) as refused:
        Trial(params, 90, budget=500, max_new=new).prefill()
    smallest = refused.value.smallest
    with pytest.raises(BudgetInfeasible) as again:
        Trial(params, 90, budget=smallest - 1, max_new=new).prefill()
    assert again.value.smallest == smallest
    trial = Trial(params, 90, budget=smallest, max_new=new).prefill()
    peaks = []
    for step in range(new):
        trial.step(step)
        peaks.append(trial.session.memory.account.peak)
    assert max(peaks) <= smallest
    assert change != {"marks": "none"} or new < 40 or max(peaks) == smallest, (
        "chunks as long as they may be take it all"
    )
    spans = trial.spans()
    assert [a for a, _ in spans[1:]] == [b for _, b in spans[:-1]], "spans follow one another"
    if new == 40:
        assert spans[-1][1] > 90, "decoded tokens became chunks"
    trial.session.close()


def test_without_limits_every_chunk_is_named_and_everything_attended() -> None:
    trial = Trial(PARAMS, 60, max_new=30, seed=2).prefill()
    keys, values = trial.keys, trial.values
    for step in range(30):
        out = trial.step(step)
        keys, values = (
            np.concatenate([all_, new[:, :, None]], 2) for all_, new in ((keys, trial.k), (values, trial.v))
        )
        assert trial.selections == [None, None]
        for layer in range(SHAPE.layers):
            logits = np.einsum("gid,gtd->git", trial.q[layer].reshape(2, 2, -1), keys[layer]) / SHAPE.head_dim**0.5
            p = np.exp(logits - logits.max(-1, keepdims=True))
            full = (p / p.sum(-1, keepdims=True)) @ values[layer]
            np.testing.assert_allclose(out[layer].numpy(), full.reshape(4, -1), atol=1e-5)
    assert trial.spans()[-1][1] > 60
    assert trial.session.memory.transfers.total == {"h2d": 0, "d2h": 0}
    trial.session.close()


def test_a_dense_first_layer_attends_everything_and_the_others_select() -> None:
    params = dataclasses.replace(PARAMS, dense_layers=1)
    budget = int(0.95 * SHAPE.full_kv_bytes(91))
    trial, alike = Trial(params, 80, budget=budget, max_new=10).prefill(), Trial(PARAMS, 80, max_new=10).prefill()
    for step in range(10):
        out, full = trial.step(step), alike.step(step)
        torch.testing.assert_close(out[0], full[0], atol=1e-6, rtol=1e-6)
        assert trial.selections[0] is None
        assert trial.selections[1] is not None
    trial.session.close()


def test_minima_and_maxima_take_one_token_per_chunk() -> None:
    trial = Trial(dataclasses.replace(PARAMS, usage=0.3), 90).prefill()
    noted = {note.name: note.values for note in trial.session.method.drain_journal()}["preselection_bytes"]
    chunks = len(trial.spans()) - 1
    covered = trial.spans()[-1][1] - PARAMS.sinks
    assert noted.tolist() == [SHAPE.full_kv_bytes(chunks), SHAPE.full_kv_bytes(covered)]


def test_a_prompt_shorter_than_the_sinks_runs() -> None:
    trial = Trial(PARAMS, 2, max_new=20, budget=10**6).prefill()
    for step in range(20):
        assert torch.isfinite(trial.step(step)).all()
    assert trial.spans()[0] == (0, 2)
    assert len(trial.spans()) > 1
    trial.session.close()


def test_bad_parameters_are_one_sentence() -> None:
    for bad, word in (
        ({"length": 0}, "length"),
        ({"deviation": 0}, "deviation"),
        ({"usage": 1.5}, "usage"),
        ({"sinks": -1}, "sinks"),
        ({"dense_layers": -1}, "dense_layers"),
        ({"marks": "all"}, "marks"),
        ({"group": "sum"}, "group"),
    ):
        with pytest.raises(ValueError, match=rf"^sentkv: [^\n]*{word}[^\n]*\.$"):
            make_parameters(SentKVCompress, None, bad)
    with pytest.raises(ValueError, match="raise usage"):
        Trial(dataclasses.replace(PARAMS, usage=0.01), 90).prefill()


def test_floor_needs_no_torch_and_grows_with_the_prompt() -> None:
    floors = [SentKVCompress.floor_bytes(PARAMS, SHAPE, n, 16) for n in (2, 50, 200, 800)]
    assert floors == sorted(floors)


def test_marks_follow_the_model_the_paper_names() -> None:
    def marks(model: str, choice: str = "auto") -> str:
        context = RunContext(SHAPE, 9, 1, None, 0, 0, model, torch.float32, torch.device("cpu"))
        return SentKVCompress(SentKVParameters(marks=choice), context)._marks

    assert [marks(m) for m in ("lmsys/longchat-7b-v1.5-32k", "Mistral-7B-Instruct-v0.2", "demo")] == [
        "one",
        "mid",
        "mid",
    ]
    assert marks("deepseek-ai/DeepSeek-R1-Distill-Llama-8B") == "full"
    assert marks("Mistral-7B", "none") == "none"
