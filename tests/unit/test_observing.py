"""Generations that kvlens does not steer, observed: tokens, positions, masses, bytes, holds, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    GenerationConfig,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    QuantizedCache,
    StaticCache,
)
from transformers.models.llama import modeling_llama

import kvlens
from kvlens.observing.options import Options
from kvlens.observing.preparing import OWN_ROOM, prepare_observed
from kvlens.observing.watch import Watch
from kvlens.observing.written import ROOM, Shadow, Written
from kvlens.text.prompts import Prompt, PromptText

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": 1,
}
NEW = 6


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return PreTrainedTokenizerFast(tokenizer_file=str(kvlens.PACKAGE / "demo" / "weights" / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), **SIZES)
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def ids(tokenizer: Any) -> torch.Tensor:
    return tokenizer(kvlens.sample("demo").text, return_tensors="pt")["input_ids"][:, :70]


@pytest.fixture(params=["sdpa", "eager"])
def attention(request: Any, model: Any) -> Iterator[str]:
    model.set_attn_implementation(request.param)
    yield request.param
    model.set_attn_implementation("sdpa")


def generate(model: Any, ids: torch.Tensor, **keywords: Any) -> torch.Tensor:
    result: torch.Tensor = model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False, **keywords)
    return result


def watched(model: Any, tokenizer: Any, ids: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor, Any]:
    watch = Watch(model, tokenizer)
    watch.open()
    try:
        tokens = generate(model, ids, **keywords)
    finally:
        watch.leave()
    watch.observer.finish(watch._heard.sequence)
    return tokens, watch.observer


def decode_cut(model: Any, ids: torch.Tensor, keep: list[int], change: Any = None) -> list[int]:
    """Read a prompt, keep some positions of the cache, decode: a press in three lines."""
    cache, tokens = DynamicCache(), []
    fed = ids
    with torch.no_grad():
        for step in range(NEW):
            position = torch.arange(ids.shape[1] + step - 1, ids.shape[1] + step)[None] if step else None
            logits = model(fed, past_key_values=cache, position_ids=position).logits
            if not step:
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[:, :, keep].clone(), layer.values[:, :, keep].clone()
                    if change is not None:
                        change(layer)
            fed = logits[:, -1:].argmax(-1)
            tokens.append(int(fed))
    return tokens


def test_tokens_are_equal_and_functions_come_back(
    model: Any, tokenizer: Any, ids: torch.Tensor, attention: str
) -> None:
    eager, update = modeling_llama.eager_attention_forward, DynamicCache.update
    sdpa = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]
    plain = generate(model, ids)
    tokens, observer = watched(model, tokenizer, ids)
    assert torch.equal(plain, tokens)
    assert [step.token for step in observer.steps] == tokens[0, ids.shape[1] :].tolist()
    assert max(step.errors for step in observer.steps) < 1e-5
    assert {step.kinds["nothing"] for step in observer.steps} == {0.0}
    assert (modeling_llama.eager_attention_forward, DynamicCache.update) == (eager, update)
    assert modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa
    assert "generate" not in vars(model)
    assert not model._forward_hooks
    assert not model.base_model._forward_pre_hooks


def test_a_block_becomes_a_stored_run(model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    keep = [*range(8), *range(40, 70)]
    with kvlens.observe(model, tokenizer, answer="zzz", runs=tmp_path, progress=False) as seen:
        tokens = decode_cut(model, ids, keep)
    run = seen.run
    assert (run.status, run.meta.method) == ("completed", "observed")
    assert bool(run.reader.self_checks()["passed"].all())
    assert run.steps()["token_id"].tolist() == tokens
    kept = run.kv_steps().groupby("step")["attended_tokens"].first().tolist()
    assert kept == [70, *(len(keep) + step for step in range(1, NEW))]
    missing = run.head_steps().query("step > 0")
    assert float(missing["unread"].max()) > 0.01
    np.testing.assert_allclose(missing["coverage"] + missing["unread"], 1, atol=2e-3)
    events = run.events()
    assert set(events[events["kind"] == "evict"]["span"]) == {2}
    assert set(events[events["kind"] == "thin"]["span"]) == {1, 3}
    assert run.meta.reference is not None
    full = kvlens.open(run.meta.reference, runs=tmp_path)
    losses = run.steps()["kl_nats"].dropna()
    assert losses.iloc[0] < 1e-6
    assert full.meta.method == "full"
    assert run.meta.observed is not None
    assert run.meta.observed.cache == "DynamicCache"
    assert run.meta.observed.shadow_bytes == 2 * 3 * 2 * 16 * 4 * (70 + ROOM)


def test_full_kv_observed_equals_full_kv_run(model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    with kvlens.observe(model, tokenizer, runs=tmp_path, progress=False) as seen:
        generate(model, ids)
    run = seen.run
    full = kvlens.open(str(run.meta.reference), runs=tmp_path)
    assert run.steps()["token_id"].tolist() == full.steps()["token_id"].tolist()
    own, theirs = run.head_steps(), full.head_steps()
    np.testing.assert_allclose(own["entropy_nats"], theirs["entropy_nats"], atol=1e-3)
    np.testing.assert_allclose(own["qcos"].dropna(), theirs["qcos"].dropna(), atol=1e-3)
    assert float(run.steps()["kl_nats"].max()) < 1e-6
    assert run.meta.observed is not None
    assert run.meta.observed.unmatched_mass == 0.0
    regret = run.head_steps()["reference_regret"]
    assert float(regret.max()) < 1e-3, "full KV misses nothing of its own"
    assert len(regret.dropna()) == len(regret)
    assert run.reader.has_reference_masses()


def test_a_hold_puts_keys_and_values_back(model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    keep = [*range(8), *range(60, 70)]
    with kvlens.observe(model, tokenizer, runs=tmp_path, progress=False) as seen:
        decode_cut(model, ids, keep)
    everything = [(layer, head, span) for layer in range(3) for head in range(2) for span in range(1, 6)]
    with kvlens.observe(model, tokenizer, repeat=seen.run, hold=everything, runs=tmp_path, progress=False) as again:
        decode_cut(model, ids, keep)
    full = kvlens.open(str(seen.run.meta.reference), runs=tmp_path)
    assert again.run.steps()["token_id"].tolist() == full.steps()["token_id"].tolist()
    assert float(again.run.steps()["kl_nats"].max()) < 1e-6
    assert (again.run.meta.parent, len(again.run.meta.hold)) == (seen.run.uid, 5)
    assert again.run.whatif is not None
    assert again.run.whatif.held_tokens == 69
    heads = again.run.head_steps()
    assert float(heads["coverage"].min()) > 0.998
    with kvlens.observe(model, tokenizer, repeat=seen.run, drop=[(0, 1, 1)], runs=tmp_path, progress=False) as dropped:
        decode_cut(model, ids, keep)
    counts = dropped.run.kv_steps().set_index(["step", "layer", "kv_head"])["attended_tokens"]
    assert counts[1, 0, 0] - counts[1, 0, 1] == 8
    assert dropped.run.whatif is not None
    assert dropped.run.whatif.dropped_tokens == 16


def test_rewritten_and_rotated_keys_are_found(model: Any, tokenizer: Any, ids: torch.Tensor) -> None:
    def shrink(layer: Any) -> None:
        layer.keys = (layer.keys * 8).round() / 8

    for change, kind in ((shrink, "rewritten"), (None, "exact")):
        watch = Watch(model, tokenizer)
        watch.open()
        decode_cut(model, ids, list(range(70)), change)
        watch.leave()
        last = watch.observer.steps[-1] if watch.observer.steps else watch.observer._waiting[-1]
        assert last.kinds["nothing"] == 0
        assert last.kinds[kind] >= 3 * 2 * 70
        assert bool(last.present.all())
        rewritten = float(last.measured.head["mass_rewritten"].min())
        assert (rewritten > 0.05) == (kind == "rewritten")


@pytest.mark.parametrize("chunk", [None, 40])
def test_full_kv_misses_nothing_of_its_own(
    model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path, chunk: int | None
) -> None:
    """A prompt read whole has full KV's keys in the shadow copy; one read in chunks is read again."""
    with kvlens.observe(model, tokenizer, runs=tmp_path, progress=False) as seen:
        generate(model, ids, prefill_chunk_size=chunk)
    regret = seen.run.head_steps()["reference_regret"]
    assert (seen._watch.observer.prompt_passes == 1) == (chunk is None)
    assert len(regret.dropna()) == NEW * 3 * 4
    assert float(regret.max()) < 1e-3


def test_full_kvs_own_mass_on_evicted_tokens_is_the_models(
    model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    keep = [*range(8), *range(40, 70)]
    with kvlens.observe(model, tokenizer, runs=tmp_path, progress=False) as seen:
        tokens = decode_cut(model, ids, keep)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = model(torch.cat([ids, torch.tensor([tokens[:1]])], 1), output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    unread = torch.stack([1 - weights[0, :, -1, [*keep, 70]].sum(-1) for weights in whole])
    own = seen.run.head_steps().query("step == 1").sort_values(["layer", "q_head"])
    np.testing.assert_allclose(own["reference_unread"], unread.flatten(), atol=2e-3)
    assert float(unread.max()) > 0.05


def test_a_rewritten_page_is_a_state_with_its_error(
    model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    def merge(layer: Any) -> None:
        layer.keys[:, 0, 20:24] *= 1.125

    with kvlens.observe(model, tokenizer, runs=tmp_path, progress=False) as seen:
        decode_cut(model, ids, list(range(70)), merge)
    reader, events = seen.run.reader, seen.run.events()
    rewritten = events[events["kind"] == "rewrite"]
    assert {(row.step, row.kv_head, row.span) for row in rewritten.itertuples()} == {(0, 0, 2)}
    np.testing.assert_allclose(rewritten["value"], 0.125, atol=1e-5)
    states = [reader.span_states(1, 0, head).set_index("span")["state"][2] for head in (0, 1)]
    assert states == ["rewritten", "resident"]
    heads = seen.run.head_steps().query("step == 1")
    assert (heads["mass_rewritten"] > 0).tolist() == [True, True, False, False] * 3
    assert (heads["coverage"] < 0.9999).tolist() == [True, True, False, False] * 3
    assert float(heads["unread"].max()) == 0


def test_keys_that_match_nothing_are_reported_with_their_mass(model: Any, tokenizer: Any, ids: torch.Tensor) -> None:
    def replace(layer: Any) -> None:
        layer.keys[:, :, :20] = torch.randn(layer.keys[:, :, :20].shape, generator=torch.Generator().manual_seed(1)) * 9

    watch = Watch(model, tokenizer)
    watch.open()
    decode_cut(model, ids, list(range(70)), replace)
    watch.leave()
    last = watch.observer.steps[-1]
    assert last.kinds["nothing"] == 3 * 2 * 20
    assert last.kinds["unmatched"] > 0.05
    heads = last.measured.head
    np.testing.assert_allclose(heads["mass_mean"].mean(), last.kinds["unmatched"], rtol=1e-4)
    assert last.measured.worst < 1e-5


def test_a_static_cache_is_observed(model: Any, tokenizer: Any, ids: torch.Tensor) -> None:
    def cache() -> Any:
        return StaticCache(config=model.config, max_cache_len=96)

    plain = generate(model, ids, past_key_values=cache())
    tokens, observer = watched(model, tokenizer, ids, past_key_values=cache())
    assert torch.equal(plain, tokens)
    assert [step.measured.kv["attended_tokens"].max() for step in observer.steps] == list(range(70, 70 + NEW))
    whole = 2 * 3 * 2 * 16 * 4 * 96
    assert all(whole <= sum(step.held) < whole + 1024 for step in observer.steps)
    assert observer.cache_name == "StaticCache"
    assert {step.kinds["nothing"] for step in observer.steps} == {0.0}
    assert max(step.errors for step in observer.steps) < 1e-5


def test_windowed_layers_record_no_full_attention(tokenizer: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=len(tokenizer), sliding_window=24, **SIZES)
    windowed = MistralForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    plain = generate(windowed, ids)
    with kvlens.observe(windowed, tokenizer, runs=tmp_path, progress=False) as seen:
        tokens = generate(windowed, ids)
    run = seen.run
    assert torch.equal(plain, tokens)
    assert set(run.kv_steps()["attended_tokens"]) == {24}
    assert run.head_steps()["coverage"].isna().all()
    assert run.meta.observed is not None
    assert run.meta.observed.windowed_layers == (0, 1, 2)
    assert run.meta.observed.no_reference is None
    assert bool(run.reader.self_checks()["passed"].all())
    assert run.verdict.outcome == "kept", "full KV of such a model is its windows"


LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
"""a decoder whose cache holds one compressed vector per token (MLA)"""


@pytest.mark.parametrize("keep", [list(range(70)), [*range(8), *range(40, 70)]])
def test_compressed_keys_are_found_by_the_vectors_of_the_cache(
    tokenizer: Any, ids: torch.Tensor, tmp_path: Path, keep: list[int]
) -> None:
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    config = DeepseekV3Config(vocab_size=len(tokenizer), **(sizes | LATENT))
    latent = DeepseekV3ForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    plain = decode_cut(latent, ids, keep)
    with kvlens.observe(latent, tokenizer, runs=tmp_path, progress=False) as seen:
        tokens = decode_cut(latent, ids, keep)
    run, observed = seen.run, seen.run.meta.observed
    assert tokens == plain
    assert observed is not None
    assert (observed.entries["unmatched"], observed.entries["rewritten"], observed.shadow_bytes) == (0, 0, 0)
    assert observed.no_full_attention is not None
    assert observed.no_reference is not None
    attended = run.kv_steps().query("step == 1")["attended_tokens"]
    assert set(attended) == {len(keep) + 1}
    assert run.head_steps()["coverage"].isna().all()
    assert run.kv_steps()["read_bytes"].isna().all()
    assert bool(run.reader.self_checks()["passed"].all())
    assert run.meta.oracle is None


@pytest.mark.parametrize(
    ("config", "kind", "attending"),
    [
        (
            JambaConfig(hidden_size=32, num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1),
            JambaForCausalLM,
            1,
        ),
        (MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64), MambaForCausalLM, 0),
    ],
)
def test_models_with_layers_that_do_not_attend_are_refused(
    tokenizer: Any, config: Any, kind: Any, attending: int
) -> None:
    config.vocab_size, config.intermediate_size, config.num_experts = 64, 32, 1
    with torch.device("meta"):
        hybrid = kind(config)
    hybrid.config._attn_implementation = "sdpa"
    with pytest.raises(kvlens.RequestError) as refusal:
        kvlens.observe(hybrid, tokenizer)
    assert refusal.value.code == "layers_without_attention"
    assert refusal.value.values == {"attention_layers": attending, "layers": 2}


def test_transformers_itself_refuses_offloaded_caches_without_cuda(
    model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    """The sentence of docs/parity.md. With CUDA the cache is observed."""
    if torch.cuda.is_available():
        pytest.skip("transformers runs its offloaded caches here")
    with pytest.raises((AssertionError, RuntimeError)):
        generate(model, ids, cache_implementation="offloaded")
    seen = kvlens.observe(model, tokenizer, runs=tmp_path, progress=False)
    with pytest.raises((AssertionError, RuntimeError)), seen:
        generate(model, ids, cache_implementation="offloaded")
    with pytest.raises(kvlens.RequestError) as refusal:
        _ = seen.run
    assert refusal.value.code == "block_open"


@pytest.mark.timeout(1800)  # quanto compiles its extension when it is used first
@pytest.mark.parametrize(("backend", "package"), [("quanto", "optimum.quanto"), ("hqq", "hqq")])
def test_a_quantised_cache_is_observed(
    tokenizer: Any, ids: torch.Tensor, tmp_path: Path, backend: str, package: str
) -> None:
    pytest.importorskip(package)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), **(SIZES | {"head_dim": 64}))
    wide = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    axes = {"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}

    def cache() -> Any:
        return QuantizedCache(backend, wide.config, nbits=4, residual_length=16, **axes)

    plain = generate(wide, ids, past_key_values=cache())
    with kvlens.observe(wide, tokenizer, runs=tmp_path, progress=False, compare=False) as seen:
        tokens = generate(wide, ids, past_key_values=cache())
    events = seen.run.events()
    observed = seen.run.meta.observed
    assert torch.equal(plain, tokens)
    assert observed is not None
    assert (observed.cache, observed.entries["unmatched"]) == ("QuantizedCache", 0)
    rewritten = events[events["kind"] == "rewrite"]
    assert len(rewritten.groupby(["layer", "kv_head", "span"])) == 3 * 2 * 5
    assert 0 < float(rewritten["value"].max()) < 0.5


def test_one_row_of_a_padded_batch(model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    short = ids[:, 20:]
    padded = torch.cat([torch.zeros(1, 20, dtype=torch.long), short], 1)
    batch, mask = torch.cat([ids, padded]), torch.ones(2, 70, dtype=torch.long)
    mask[1, :20] = 0
    plain = generate(model, batch, attention_mask=mask)
    watch = Watch(model, tokenizer, Options(row=1))
    watch.open()
    tokens = generate(model, batch, attention_mask=mask)
    watch.leave()
    observer = watch.observer
    observer.finish(watch._heard.sequence)
    assert torch.equal(plain, tokens)
    assert (observer.prompt_tokens, observer.pads) == (50, 20)
    assert observer.tokens[:50] == short[0].tolist()
    assert [step.token for step in observer.steps] == tokens[1, 70:].tolist()
    assert [int(step.measured.kv["attended_tokens"].max()) for step in observer.steps] == list(range(50, 50 + NEW))


def test_a_question_in_one_pass_becomes_steps(model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    with kvlens.observe(model, tokenizer, runs=tmp_path, progress=False) as seen, torch.no_grad():
        cache = DynamicCache()
        model.model(ids[:, :60], past_key_values=cache)
        fed = ids[:, 60:]
        for _ in range(3):
            fed = model(fed, past_key_values=cache).logits[:, -1:].argmax(-1)
    run = seen.run
    assert (run.meta.prompt_tokens, run.meta.question_tokens) == (60, 10)
    assert run.steps()["token_id"].tolist()[:10] == ids[0, 60:].tolist()
    assert run.steps()["kl_nats"].isna().tolist()[:10] == [True] * 10
    assert float(run.steps()["kl_nats"].max()) < 1e-6


def test_a_pass_that_leaves_nothing_is_no_step(model: Any, tokenizer: Any, ids: torch.Tensor) -> None:
    watch = Watch(model, tokenizer)
    watch.open()
    with torch.no_grad():
        cache = DynamicCache()
        model.model(ids, past_key_values=cache)

        def cut(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            layer = cache.layers[module.layer_idx]
            layer.keys, layer.values = layer.keys[:, :, :70], layer.values[:, :, :70]

        hooks = [layer.self_attn.register_forward_hook(cut, with_kwargs=True) for layer in model.model.layers]
        model.model(ids[:, :30], past_key_values=cache)
        for hook in hooks:
            hook.remove()
        for _ in range(2):
            model(ids[:, -1:], past_key_values=cache)
    watch.leave()
    observer = watch.observer
    observer.finish(None)
    assert observer.stopped is None
    assert len(observer.tokens) == 72
    assert [step.position for step in observer.steps] == [69, 70]  # what the last pass chose was not fed


def test_without_a_shadow_exact_keys_are_found(model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    with kvlens.observe(model, tokenizer, shadow=False, runs=tmp_path, progress=False) as seen:
        decode_cut(model, ids, list(range(30, 70)))
    heads = seen.run.head_steps()
    assert heads["coverage"].isna().all()
    assert seen.run.meta.observed is not None
    assert seen.run.meta.observed.shadow_bytes == 0
    assert seen.run.kv_steps().query("step == 1")["attended_tokens"].tolist() == [41] * 6
    assert "oracle" not in seen.run.meta.model_fields_set or seen.run.meta.oracle is None


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "kvlens"])
def test_attention_without_masks_is_refused(model: Any, tokenizer: Any, name: str) -> None:
    model.config._attn_implementation = name
    try:
        with pytest.raises(kvlens.RequestError) as refusal:
            kvlens.observe(model, tokenizer)
    finally:
        model.config._attn_implementation = "sdpa"
    assert (refusal.value.code, refusal.value.values["attention"]) == ("attention_without_weights", name)


def test_refusals(model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(kvlens.RequestError) as refusal, kvlens.observe(model, tokenizer, runs=tmp_path):
        pass
    assert refusal.value.code == "nothing_observed"
    with pytest.raises(kvlens.RequestError) as refusal, kvlens.observe(model, tokenizer, row=3, runs=tmp_path):
        generate(model, ids)
    assert refusal.value.values == {"row": 3, "rows": 1}
    for oracle in ("every=0", "layers=99", 5):
        with pytest.raises(kvlens.RequestError) as refusal:
            kvlens.observe(model, tokenizer, oracle=oracle, runs=tmp_path)  # type: ignore[arg-type]
        assert (refusal.value.code, refusal.value.values) == ("bad_value", {"name": "oracle", "value": oracle})
    with kvlens.observe(model, tokenizer, runs=tmp_path, progress=False) as seen:
        with pytest.raises(kvlens.RequestError) as refusal, kvlens.observe(model, tokenizer, runs=tmp_path):
            pass
        assert refusal.value.code == "already_observed"
        with pytest.raises(kvlens.RequestError) as refusal:
            _ = seen.run
        assert refusal.value.code == "block_open"
        generate(model, ids)
    with pytest.raises(kvlens.RunError) as lookup:
        seen.run.hold(span=1)
    assert lookup.value.code == "observed_run"
    with pytest.raises(kvlens.RequestError) as refusal:
        kvlens.observe(model, tokenizer, hold=[(0, 0, 1)])
    assert refusal.value.code == "repeat_missing"
    with pytest.raises(kvlens.RequestError) as refusal:
        kvlens.observe(model, tokenizer, repeat=seen.run, hold=[(0, 0, 99)])
    assert refusal.value.code == "unknown_span"
    with pytest.raises(kvlens.RequestError) as refusal:
        kvlens.observe(model, tokenizer, repeat=seen.run, hold=[(9, 0, 1)])
    assert (refusal.value.code, refusal.value.values["most"]) == ("bad_value", 2)


def test_an_error_in_the_block_keeps_what_was_seen(
    model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    seen = kvlens.observe(model, tokenizer, runs=tmp_path, progress=False)

    def fail() -> None:
        with seen:
            generate(model, ids)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (seen.run.status, len(seen.run.steps())) == ("failed", NEW)


def sample(model: Any, ids: torch.Tensor, steps: int) -> list[int]:
    """Decode by a loop that draws its tokens."""
    cache, fed, drawn = DynamicCache(), ids, []
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(steps):
            logits = model(fed, past_key_values=cache).logits[:, -1]
            fed = torch.multinomial((logits / 4).softmax(-1), 1, generator=generator)
            drawn.append(int(fed))
    return drawn


def test_what_was_not_seen_is_not_recorded(model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    with kvlens.observe(model, tokenizer, runs=tmp_path, progress=False, compare=False) as seen:
        model.generate(input_ids=ids, max_new_tokens=3, do_sample=True, temperature=1.7)
    run = seen.run
    assert run.steps()[["wait_us", "h2d_bytes", "d2h_bytes"]].isna().all(axis=None)
    assert run.meta.lacks("transfer")
    meta = run.meta
    assert (meta.max_new, meta.temperature, meta.top_p, meta.seed, meta.stopped) == (None,) * 5
    assert meta.observed is not None
    assert meta.observed.sampled is True


def test_times_count_from_the_first_pass(model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    with kvlens.observe(model, tokenizer, runs=tmp_path, progress=False, compare=False) as seen:
        generate(model, ids)
    steps = seen.run.steps()
    assert steps["t_us"].iloc[0] == 0
    assert seen.run.meta.prefill_us == steps["dur_us"].iloc[0]


def test_padding_on_the_right_is_refused(model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    padded = torch.cat([ids, torch.zeros(1, 10, dtype=torch.long)], 1)
    mask = (torch.arange(80) < 70).long()[None]
    for feed in (model.generate, model):
        with (
            pytest.raises(kvlens.RequestError) as refusal,
            kvlens.observe(model, tokenizer, runs=tmp_path, progress=False),
        ):
            feed(input_ids=padded, attention_mask=mask)
        assert (refusal.value.code, refusal.value.values) == ("padding_right", {"row": 0, "padding": 10})


@pytest.mark.parametrize("place", ["keyword", "config", "model"])
def test_beams_are_refused(model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path, place: str) -> None:
    before = model.generation_config
    beams = GenerationConfig(num_beams=3, max_new_tokens=2)
    model.generation_config = beams if place == "model" else before
    keywords = {"keyword": {"num_beams": 3}, "config": {"generation_config": beams}, "model": {}}[place]
    try:
        with (
            pytest.raises(kvlens.RequestError) as refusal,
            kvlens.observe(model, tokenizer, runs=tmp_path, progress=False),
        ):
            model.generate(input_ids=ids, **keywords)
    finally:
        model.generation_config = before
    assert (refusal.value.code, refusal.value.values) == ("beams", {"beams": 3})


def test_a_passed_generation_config_says_whether_tokens_are_drawn(
    model: Any, tokenizer: Any, ids: torch.Tensor
) -> None:
    watch = Watch(model, tokenizer)
    watch.open()
    try:
        model.generate(ids, GenerationConfig(do_sample=True, max_new_tokens=2))
    finally:
        watch.leave()
    assert watch._heard.sampled


def test_a_drawn_token_is_never_invented(model: Any, tokenizer: Any, ids: torch.Tensor) -> None:
    watch = Watch(model, tokenizer)
    watch.open()
    try:
        drawn = sample(model, ids, 5)
    finally:
        watch.leave()
    watch.observer.finish(None)
    assert [step.token for step in watch.observer.steps] == drawn[:-1]


@pytest.mark.parametrize(("greedy", "sampled"), [(True, False), (False, None)])
def test_a_loop_of_ones_own_says_only_that_it_was_greedy(
    model: Any, tokenizer: Any, ids: torch.Tensor, tmp_path: Path, greedy: bool, sampled: bool | None
) -> None:
    with kvlens.observe(model, tokenizer, runs=tmp_path, progress=False, compare=False) as seen:
        decode_cut(model, ids, list(range(70))) if greedy else sample(model, ids, 4)
    assert seen.run.meta.observed is not None
    assert seen.run.meta.observed.sampled is sampled
    assert (seen.run.meta.seed is None) is not greedy


def test_bytes_of_a_batch_are_the_rows_share(model: Any, tokenizer: Any, ids: torch.Tensor) -> None:
    _, alone = watched(model, tokenizer, ids)
    _, among = watched(model, tokenizer, ids.repeat(4, 1))
    assert [step.held for step in among.steps] == [step.held for step in alone.steps]
    assert [step.peak for step in among.steps] == [step.peak for step in alone.steps]


def test_what_the_caller_had_set_comes_back(model: Any, tokenizer: Any, ids: torch.Tensor) -> None:
    original, update = model.generate, DynamicCache.update
    owner = next(kind for kind in DynamicCache.__mro__ if "update" in vars(kind))

    def mine(*args: Any, **keywords: Any) -> Any:
        return original(*args, **keywords)

    def later(*args: Any, **keywords: Any) -> Any:
        return update(*args, **keywords)

    model.generate = mine
    watch = Watch(model, tokenizer)
    watch.open()
    owner.update = later
    watch.leave()
    try:
        assert model.generate is mine
        assert owner.update is later
    finally:
        owner.update = update
        del model.generate


def test_the_shadow_copy_is_not_copied_again_for_each_pass() -> None:
    shadow = Shadow(2)
    layers = [Written(shadow, layer, 3) for layer in range(2)]
    keys = torch.randn(3, 40, 8)
    places = set()
    for at in range(40):
        for layer in layers:
            layer.append(keys[:, at : at + 1], -keys[:, at : at + 1])
        whole = shadow.keys(at + 1)
        assert whole is not None
        places.add(whole.data_ptr())
    assert len(places) == 1
    layers[0].cut(7)
    layers[0].append(keys[:, 7:9] + 1, keys[:, 7:9])
    own = layers[0].keys
    assert own is not None
    assert torch.equal(own, torch.cat([keys[:, :7], keys[:, 7:9] + 1], 1))
    values = layers[1].values
    assert values is not None
    assert torch.equal(values, -keys)


def test_full_kv_may_end_its_answer_where_the_run_ended_its_own(tiny: Any) -> None:
    prompt = Prompt(PromptText("x"), (1, 2, 3), ("x", "y", "z"), (None, None, None), None, ())
    loaded = replace(tiny, eos=frozenset({7}))
    for tokens, steps in (([4, 5, 7], OWN_ROOM), ([4, 5, 6], 3), ([4] * 80 + [7], 81), ([], 1)):
        assert prepare_observed(loaded, prompt, tokens)[1].max_new == steps
