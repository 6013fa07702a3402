"""A hold keeps a token range exactly for chosen heads, a drop keeps one out of their attention, and both change nothing
else: held against one method of each make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import ListSink, makes, method_of, raises_code, random_prompt, run, task_prompt

from kvlens import methods
from kvlens.engine.engine import Engine, Options
from kvlens.engine.hf_attention import attending
from kvlens.holds import Drop, Hold
from kvlens.memory.counterfactual import Counterfactual
from kvlens.rows import MASS_COLUMNS, SpanRow
from kvlens.shape import KVShape
from kvlens.tiers.hot import HotTier
from kvlens.tiers.layout import SLOT_TABLE_BYTES, Layout, Zones
from kvlens.tiers.slots import FREE, ROLE, Slots, SpanTable

NAMES = [*makes(), "sekv zones=layer", "sekv zones=model"]
NEW = 8
CHOOSES_ALL = ("rocketkv",)
"""methods that choose among the newest tokens as among the others: nothing is attended anyway"""


def everywhere(shape: Any) -> tuple[tuple[int, int], ...]:
    return tuple((layer, head) for layer in range(shape.layers) for head in range(shape.kv_heads))


def settings_of(name: str, share: str = "0.2") -> dict[str, Any]:
    chosen = method_of(name)
    preset = "demo" if "demo" in chosen.presets else None
    return {"budget": None if chosen.keeps_all else share, "preset": preset, "keep_logits": True}


class Prompts:
    """The prompt of these tests, read once, and each method's plain run on it with what it recorded."""

    def __init__(self, demo: Any) -> None:
        self.demo = demo
        self.prompt, self.task = task_prompt(demo, "multikey", 768, max_new=NEW)
        self.read = Engine(demo).read(self.prompt, received=True)
        self.full = run(demo, self.prompt, "full", max_new=NEW, keep_logits=True, read=self.read)
        self._plain: dict[str, tuple[Any, ListSink]] = {}

    def plain(self, name: str) -> tuple[Any, ListSink]:
        if name not in self._plain:
            sink = ListSink()
            self._plain[name] = self.run(name, (), sink, forced=tuple(self.full.ids)), sink
        return self._plain[name]

    def run(self, name: str, holds: tuple[Hold, ...], sink: ListSink | None = None, **options: Any) -> Any:
        options = {"max_new": NEW, "planned": NEW, **options}
        return run(self.demo, self.prompt, name, sink=sink, holds=holds, read=self.read, **settings_of(name), **options)


@pytest.fixture(scope="module")
def prompts(demo: Any) -> Prompts:
    return Prompts(demo)


def missing_span(prompts: Prompts, name: str) -> Any:
    """A span of the prompt that the method does not keep in full on the device, from the middle of the prompt; where
    the method keeps everything, any span from the middle."""
    spans = [s for s in prompts.plain(name)[1].prefilled.spans if s.kind != "window" and s.tok_end - s.tok_start > 1]
    away = [s for s in spans if s.state not in ("resident", "reconstructed")] or spans
    return away[len(away) // 2]


@pytest.mark.parametrize("name", NAMES)
def test_holding_everything_everywhere_is_full_kv(prompts: Prompts, name: str) -> None:
    hold = Hold(0, 0, len(prompts.prompt.ids) + NEW - 1, everywhere(prompts.demo.shape))
    held = prompts.run(name, (hold,))
    assert held.ids == prompts.full.ids
    for mine, full in zip(held.logits, prompts.full.logits, strict=True):
        torch.testing.assert_close(mine, full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_holding_every_span_and_what_is_decoded_is_full_kv(prompts: Prompts, name: str) -> None:
    """As the one above, but span by span, as a person would ask for it."""
    spans = prompts.plain(name)[1].prefilled.spans
    holds = tuple(
        Hold(s.span, s.tok_start, s.tok_end, everywhere(prompts.demo.shape)) for s in spans if s.tok_end > s.tok_start
    )
    n = len(prompts.prompt.ids) - 1
    decoded = Hold(0, n, n + NEW, everywhere(prompts.demo.shape))  # what decoding adds may become a page that is ranked
    held = prompts.run(name, (*holds, decoded))
    assert held.ids == prompts.full.ids
    for mine, full in zip(held.logits, prompts.full.logits, strict=True):
        torch.testing.assert_close(mine, full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_holding_for_no_head_is_the_plain_run_bit_for_bit(prompts: Prompts, name: str) -> None:
    span = missing_span(prompts, name)
    plain, _ = prompts.plain(name)
    held = prompts.run(name, (Hold(span.span, span.tok_start, span.tok_end, ()),), forced=tuple(prompts.full.ids))
    assert all(torch.equal(a, b) for a, b in zip(held.logits, plain.logits, strict=True))
    assert held.peak_bytes == plain.peak_bytes


def layer_outputs(
    prompts: Prompts, name: str, holds: tuple[Hold, ...], sink: ListSink | None = None
) -> tuple[Any, list[list[torch.Tensor]]]:
    """A run forced on full KV's tokens, and what every decoder layer handed on at every step. A method that reads the
    prompt by itself passes the layers before that."""
    seen: list[list[torch.Tensor]] = []
    layers = prompts.demo.model.model.layers

    def keep(module: Any, inputs: Any, output: Any) -> None:
        if module is layers[0]:
            seen.append([])
        seen[-1].append((output[0] if isinstance(output, tuple) else output).clone())

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        result = prompts.run(name, holds, sink, forced=tuple(prompts.full.ids))
        return result, seen[-len(result.ids) :]
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("name", NAMES)
def test_steps_before_the_hold_and_layers_below_it_are_the_plain_runs_bit_for_bit(prompts: Prompts, name: str) -> None:
    span, sink = missing_span(prompts, name), ListSink()
    layer, first = 3, 4
    plain, before = layer_outputs(prompts, name, ())
    hold = Hold(span.span, span.tok_start, span.tok_end, ((layer, 1),), first)
    held, after = layer_outputs(prompts, name, (hold,), sink)
    assert len(held.ids) == len(before) == len(after) > first
    assert all(torch.equal(a, b) for a, b in zip(held.logits[:first], plain.logits[:first], strict=True))
    for step in range(first):
        assert all(map(torch.equal, before[step], after[step]))
    assert all(map(torch.equal, before[first][:layer], after[first][:layer]))
    if span.state != "resident":
        assert not torch.equal(before[first][layer], after[first][layer]), (
            "the held span is attended from the step asked for"
        )
    for record, theirs in zip(sink.steps[:first], prompts.plain(name)[1].steps[:first], strict=True):
        for (
            column
        ) in record.head:  # steps are measured several at a time, which changes the last bits of what is logged of them
            np.testing.assert_allclose(record.head[column], theirs.head[column], atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CHOOSES_ALL])
def test_holding_what_is_attended_anyway_changes_nothing(prompts: Prompts, name: str) -> None:
    plain, sink = prompts.plain(name)
    end, heads = len(prompts.prompt.ids) - 1 + len(plain.ids), everywhere(prompts.demo.shape)
    left = max((span.tok_end for record in sink.steps for span in record.spans), default=0)
    recent = 1 if name == "tidaldecode" else 3  # it reads no token for being recent but the step's own
    held = [Hold(0, max(end - recent, left), end, heads)]  # written while it runs, and still in the window when it ends
    method = method_of(name)
    turns = method.turns_keys(methods.make_parameters(method, settings_of(name)["preset"], {}))
    kinds = () if turns else ("sink", "anchor")  # what is held is seen where it is
    held += [Hold(s.span, s.tok_start, s.tok_end, heads) for s in sink.prefilled.spans if s.kind in kinds]
    result = prompts.run(name, tuple(held), forced=tuple(prompts.full.ids))
    for mine, theirs in zip(result.logits, plain.logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_held_run_keeps_the_truths(prompts: Prompts, name: str) -> None:
    """Masses, budget, ledger, and that recording changes nothing, with a hold."""
    span, sink = missing_span(prompts, name), ListSink()
    heads = ((1, 0), (1, 1), (4, 1))
    hold = (Hold(span.span, span.tok_start, span.tok_end, heads, 1),)
    recorded = prompts.run(name, hold, sink, coverage=True)
    plain = prompts.run(name, hold)
    assert all(torch.equal(a, b) for a, b in zip(recorded.logits, plain.logits, strict=True))
    assert all(check.passed for check in recorded.checks), recorded.checks
    for record in sink.steps:
        np.testing.assert_allclose(sum(record.head[column] for column in MASS_COLUMNS), 1, atol=1e-3)
    assert {e.span for r in sink.steps for e in r.events if e.kind == "hold"} == {span.span}
    assert [(e.layer, e.kv_head) for e in sink.steps[1].events if e.kind == "hold"] == list(heads)
    full = [r.head["coverage"] for r in sink.steps]
    assert all((c <= 1 + 1e-4).all() for c in full), "nothing is attended twice"


@pytest.mark.parametrize("name", ["streaming_llm", "full"])
def test_a_hold_on_tokens_still_to_be_decoded_is_recorded_with_coverage(demo: Any, name: str) -> None:
    prompt, sink = random_prompt(40, vocabulary=1000), ListSink()
    places = {"overrides": {"sinks": 2, "tokens": 10}} if name == "streaming_llm" else {}
    ahead = Hold(0, 38, 45, ((1, 0), (3, 1)))
    held = run(demo, prompt, name, max_new=6, sink=sink, holds=(ahead,), coverage=True, **places)
    assert all(check.passed for check in held.checks), held.checks
    covered = [record.head["coverage"] for record in sink.steps]
    assert len(covered) == len(held.ids)
    assert all(((share > 0) & (share <= 1 + 1e-4)).all() for share in covered)


def test_the_bytes_of_a_hold(demo: Any) -> None:
    """The account has them under a name of their own, they raise the limit, and the method's own bytes stay what they
    were."""
    from kvlens.budget import Budget
    from kvlens.engine.session import Session
    from kvlens.methods.full import FullKV

    shape, prompt = demo.shape, random_prompt(300, vocabulary=1000)
    context = Engine(demo).context(prompt, Budget.parse("100%"), Options(max_new=4))
    holds = (Hold(3, 10, 50, ((2, 0), (5, 1))), Hold(4, 40, 60, ((2, 0), (2, 1))))
    sessions = [Session(FullKV, FullKV.Parameters(), context, holds=kept) for kept in ((), holds)]
    for session in sessions:
        for layer in range(shape.layers):
            filling = torch.randn(shape.kv_heads, 299, shape.head_dim)
            session.prompt.append(layer, filling, filling)
        session.finish_prefill(torch.zeros(299))
        session.begin_step(0, None)
    plain, held = (session.memory for session in sessions)
    slot = shape.head_token_bytes + SLOT_TABLE_BYTES
    zone = (50 + 40) * shape.kv_heads * slot  # 50 slots in layer 2, 40 in layer 5, for both KV heads
    tables = sum(t.untyped_storage().nbytes() for t in held.counterfactual.tensors()["held"])
    assert held.account.by_name()["held"] == held.counterfactual_bytes == zone + tables
    assert held.account.resident - plain.account.resident == held.counterfactual_bytes
    assert {k: v for k, v in held.account.by_name().items() if k != "held"} == {
        k: v for k, v in plain.account.by_name().items() if k != "held"
    }
    attended = sum(int((pool.held(layer).role != FREE).sum()) for pool in held.hot.pools for layer in pool.layers)
    assert attended == 50 + 20 + 40
    for session in sessions:
        session.close()


def test_a_hold_on_what_is_not_there_is_refused_in_a_sentence(demo: Any) -> None:
    prompt = random_prompt(40, vocabulary=1000)
    for hold, said in [
        (Hold(1, 0, 5, ((6, 0),)), "6 layers"),
        (Hold(1, 0, 5, ((0, 2),)), "2 KV heads"),
        (Hold(1, 0, 5000, ((0, 0),)), "ends at token 5000"),
    ]:
        with pytest.raises(ValueError, match=said):
            run(demo, prompt, "full", max_new=2, holds=(hold,))
    with pytest.raises(ValueError, match="no tokens"):
        Hold(1, 5, 5, ())
    with pytest.raises(ValueError, match="first step is 0"):
        Hold(1, 0, 5, (), -1)


FIRST, STEPS = 2, 4
"""of the runs with a drop: the step from which it is dropped, and how many are run"""


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_is_dropped_is_attended_and_nothing_else_changes(prompts: Prompts, name: str) -> None:
    """From the step on, for the heads that were named: the trace lists no span of the range, and the method's bytes and
    all that was logged before are the plain run's. The tables of the mask are counted beside the budget."""
    plain, before = prompts.plain(name)
    heads, sink, n = ((2, 0), (2, 1), (4, 1)), ListSink(), len(prompts.prompt.ids)
    spans = [s for s in before.prefilled.spans if s.kind != "window"]
    whole = [s for s in spans if s.tok_end > s.tok_start][1:-1]
    drop = Drop(0, whole[0].tok_start, whole[-1].tok_end, heads, FIRST)
    gone = {s.span for s in spans if drop.tok_start <= s.tok_start < s.tok_end <= drop.tok_end}
    assert drop.tok_end - drop.tok_start > n // 2
    fed = tuple(prompts.full.ids[:STEPS])
    ran = prompts.run(name, (), sink, drops=(drop,), forced=fed, coverage=True, top_k=256)
    assert all(torch.equal(a, b) for a, b in zip(ran.logits[:FIRST], plain.logits[:FIRST], strict=False))
    assert all(check.passed for check in ran.checks), ran.checks
    assert [(e.layer, e.kv_head, e.value) for e in sink.steps[FIRST].events if e.kind == "drop"] == [
        (layer, head, None) for layer, head in heads
    ]
    assert [e.kind for r in sink.steps[:FIRST] for e in r.events if e.kind == "drop"] == []
    table = prompts.demo.shape.kv_heads * (n + NEW) * (4 + 1)  # an int32 and a bool per position and KV head
    group, read = prompts.demo.shape.group, {True: 0, False: 0}
    for record, theirs in zip(sink.steps, before.steps, strict=False):
        assert record.resident_bytes - theirs.resident_bytes == len({layer for layer, _ in heads}) * table
        np.testing.assert_allclose(sum(record.head[column] for column in MASS_COLUMNS), 1, atol=1e-3)
        for layer, head in heads:
            mine = slice(head * group, (head + 1) * group)
            listed = gone & set(record.top_span[layer, mine].ravel().tolist())
            assert not listed or record.step < FIRST
            read[record.step >= FIRST] += len(listed)
            if record.step >= FIRST:
                out = n - (drop.tok_end - drop.tok_start) + record.step
                assert record.kv["attended_tokens"][layer, head] <= out
    assert read[False], "the plain steps attend what is dropped later"


def test_full_kv_with_a_drop_is_the_stock_model_with_these_positions_masked(demo: Any) -> None:
    """Masked from the step on, in all layers and heads; and a drop of what is not attended changes no logit."""
    n, steps, first, start, end = 60, 5, 2, 10, 35
    prompt, heads = random_prompt(n, vocabulary=1000), everywhere(demo.shape)
    drops = (Drop(0, start, end, heads, first),)
    ran = run(demo, prompt, "full", max_new=steps, keep_logits=True, drops=drops)
    ids, model = torch.tensor([prompt.ids]), demo.model
    with torch.inference_mode(), attending(model, "sdpa"):
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        fed = [prompt.ids[-1], *ran.ids[:-1]]
        for step, token in enumerate(fed):
            mask = torch.ones(1, n + step, dtype=torch.long)
            mask[:, start:end] = step < first
            made = model(torch.tensor([[token]]), past_key_values=cache, attention_mask=mask, use_cache=True)
            torch.testing.assert_close(ran.logits[step].float(), made.logits[0, -1].float(), atol=1e-4, rtol=1e-4)
    again = (Drop(0, start, end, heads, first), Drop(0, start + 1, end - 1, heads, steps - 1))
    more = run(demo, prompt, "full", max_new=steps, keep_logits=True, drops=again)
    assert all(torch.equal(a, b) for a, b in zip(ran.logits, more.logits, strict=True))


def test_a_drop_of_what_was_evicted_changes_no_logit(prompts: Prompts) -> None:
    plain, sink = prompts.plain("streaming_llm")
    gone = next(s for s in sink.prefilled.spans if s.state == "evicted")
    drop = Drop(gone.span, gone.tok_start, gone.tok_end, everywhere(prompts.demo.shape))
    ran = prompts.run("streaming_llm", (), drops=(drop,), forced=tuple(prompts.full.ids))
    for mine, theirs in zip(ran.logits, plain.logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_a_summary_goes_with_the_last_of_its_tokens_and_a_step_keeps_its_own_token() -> None:
    spans = SpanTable(4, torch.device("cpu"))
    ends = ((0, 8), (0, 4), (4, 4), (4, 8))
    spans.add([SpanRow(0, "page", start, end, -1, "") for start, end in ends])  # the third stands for no tokens
    coarse, token, free = ROLE["coarse"], ROLE["resident"], FREE
    shape = KVShape(1, 1, 1, 2, 4)
    hot = HotTier(shape, Layout(Zones(0, 0, 0, 6), 4), 0, torch.float32, torch.device("cpu"))
    role = torch.tensor([[coarse, coarse, coarse, token, token, free]], dtype=torch.uint8)
    span = torch.tensor([[1, 2, 3, 3, 3, 0]], dtype=torch.int32)
    position = torch.tensor([[0, 4, 4, 5, 8, -1]], dtype=torch.int32)
    slots = Slots(torch.zeros(1, 6, 2), torch.zeros(1, 6, 2), position, span, role)

    def attended(*ranges: tuple[int, int]) -> list[int]:
        drops = [Drop(0, start, end, ((0, 0),)) for start, end in ranges]
        dropped = Counterfactual((), drops, 1, 9, 9, torch.device("cpu"))
        dropped.start_step(hot, 0, 8)
        bias = torch.zeros(1, 1, 6).masked_fill(role == FREE, float("-inf"))
        return dropped.hide(0, slice(0, 1), slots, spans, bias)[0, 0].isfinite().nonzero().ravel().tolist()

    assert attended((0, 3)) == [0, 1, 2, 3, 4], "one of its tokens is left"
    assert attended((0, 4)) == [1, 2, 3, 4]
    assert attended((0, 9)) == [1, 4], "what stands for no span's tokens stays, and so does the step's own token"
    role[0, 1] = FREE
    assert attended((0, 9)) == [4], "and where nothing else is left it is attended alone"


def test_what_is_held_and_dropped_at_once_is_refused_in_a_sentence(demo: Any) -> None:
    prompt, heads = random_prompt(40, vocabulary=1000), ((1, 0), (2, 1))
    with raises_code("held_and_dropped", layer=2, kv_head=1):
        run(demo, prompt, "full", max_new=2, holds=(Hold(1, 5, 10, heads),), drops=(Drop(1, 8, 20, ((2, 1),)),))
    with raises_code("empty_range", span=1):
        Drop(1, 5, 5, ())
