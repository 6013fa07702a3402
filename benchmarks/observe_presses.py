"""Every press of kvpress that needs no downloaded weights, under `kvlens.observe`, in the oracle's environment.

`.oracle/bin/python -m benchmarks.observe_presses kvlens/lab/results/observed.json` makes a small random Llama with the
demo model's tokenizer. Each press generates twice from the same prompt, once observed: the tokens have to be equal.
What the observer found in the last step is compared with the cache itself, read just before that step by another rule:
every key against every written key. A press that rotates, merges or prunes keys has no such rule: there every entry
of the cache has to be found. Fails where a token or a kept set differs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvlens
from kvlens.methods.kvpress import _lacks
from kvlens.observing.hooking import press_name
from kvlens.observing.watch import Watch

CONTEXT, NEW = 160, 5
HALF = {"compression_ratio": 0.5}
LAYERS, KV_HEADS = 3, 2
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 16,
    "initializer_range": 0.2,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Case:
    """A press: how it is made, and what stays of a key."""

    make: Callable[[], Any]
    attention: str = "sdpa"
    alters: bool = False
    """keys or values in the cache are not the written ones"""
    decoding: bool = False
    """it works while tokens are decoded"""
    rotates: bool = False
    """positions behind the context are counted from the keys that stayed"""
    single: bool = False
    """layers keep different numbers of keys, which kvpress feeds one token at a time outside flash attention"""


def knorm(ratio: float = 0.5) -> Any:
    return kvpress.KnormPress(ratio)


def snap() -> Any:
    return kvpress.SnapKVPress(0.5, window_size=8)


def _duo_attention() -> Any:
    """With patterns that are drawn at random: the published ones are downloaded."""
    kvpress.DuoAttentionPress.load_attention_pattern = staticmethod(lambda model: (4, 16, PATTERN))
    return kvpress.DuoAttentionPress(0.5)


def decoding(kind: Any) -> Callable[[], Any]:
    return lambda: kind(knorm(0.0), compression_interval=2, target_size=100)


CASES: dict[str, Case] = {
    "AdaKVPress": Case(lambda: kvpress.AdaKVPress(snap())),
    "BlockPress": Case(lambda: kvpress.BlockPress(knorm(), block_size=32)),
    "CAMPress": Case(lambda: kvpress.CAMPress(knorm(0.0), 2, 100), alters=True, decoding=True),
    "CURPress": Case(lambda: kvpress.CURPress(**HALF)),
    "CapPress": Case(lambda: kvpress.CapPress(**HALF)),
    "ChunkKVPress": Case(lambda: kvpress.ChunkKVPress(knorm(), chunk_length=8)),
    "ChunkPress": Case(lambda: kvpress.ChunkPress(knorm(), chunk_length=64)),
    "CompactorPress": Case(lambda: kvpress.CompactorPress(**HALF)),
    "ComposedPress": Case(lambda: kvpress.ComposedPress([snap(), kvpress.ThinKPress(0.25)]), alters=True),
    "CompressionRatioDecodingPress": Case(
        lambda: kvpress.CompressionRatioDecodingPress(knorm(0.0), 2, target_compression_ratio=0.4), decoding=True
    ),
    "CriticalAdaKVPress": Case(lambda: kvpress.CriticalAdaKVPress(snap())),
    "CriticalKVPress": Case(lambda: kvpress.CriticalKVPress(snap())),
    "DMSPress": Case(lambda: kvpress.DMSPress(knorm(), threshold=-2.5, sliding_window_size=16)),
    "DecodingPress": Case(decoding(kvpress.DecodingPress), decoding=True),
    "DuoAttentionPress": Case(_duo_attention),
    "EntropyGatedChunkKVPress": Case(lambda: kvpress.EntropyGatedChunkKVPress(knorm())),
    "ExpectedAttentionPress": Case(lambda: kvpress.ExpectedAttentionPress(**HALF)),
    "FinchPress": Case(lambda: kvpress.FinchPress(**HALF), alters=True, rotates=True),
    "KVComposePress": Case(lambda: kvpress.KVComposePress(compression_ratio=0.5), single=True),
    "KVgradPress": Case(lambda: kvpress.KVgradPress(**HALF)),
    "KVzipPress": Case(lambda: kvpress.KVzipPress(**HALF)),
    "KeyDiffPress": Case(lambda: kvpress.KeyDiffPress(**HALF)),
    "KeyRerotationPress": Case(lambda: kvpress.KeyRerotationPress(knorm()), alters=True, rotates=True),
    "KnormPress": Case(knorm),
    "LagKVPress": Case(lambda: kvpress.LagKVPress(0.5, lag_size=32)),
    "LeverageScorePress": Case(lambda: kvpress.LeverageScorePress(**HALF)),
    "MergingPress": Case(lambda: kvpress.MergingPress(knorm()), alters=True),
    "NonCausalAttnPress": Case(lambda: kvpress.NonCausalAttnPress(**HALF)),
    "ObservedAttentionPress": Case(lambda: kvpress.ObservedAttentionPress(**HALF), attention="eager"),
    "PerLayerCompressionPress": Case(lambda: kvpress.PerLayerCompressionPress(knorm(), [0.2, 0.5, 0.7]), single=True),
    "PrefillDecodingPress": Case(
        lambda: kvpress.PrefillDecodingPress(snap(), kvpress.DecodingPress(knorm(0.0), 2, 60)), decoding=True
    ),
    "PyramidKVPress": Case(lambda: kvpress.PyramidKVPress(0.5, window_size=8), single=True),
    "RandomPress": Case(lambda: kvpress.RandomPress(0.5, seed=3)),
    "SimLayerKVPress": Case(lambda: kvpress.SimLayerKVPress(0.0, 4, 32, 4)),
    "SnapKVPress": Case(snap),
    "StreamingLLMPress": Case(lambda: kvpress.StreamingLLMPress(**HALF)),
    "TOVAPress": Case(lambda: kvpress.TOVAPress(**HALF)),
    "ThinKPress": Case(lambda: kvpress.ThinKPress(0.25), alters=True),
}
DOWNLOADS = {
    "ExpectedAttentionStatsPress": "statistics of queries",
    "FastKVzipPress": "trained gates",
    "KVzapPress": "trained scorers",
    "LUKVPress": "budget curves",
    "QFilterPress": "trained filters",
    "RestoreKVPress": "trained restore tokens",
}


PATTERN = np.random.default_rng(0).random((LAYERS, KV_HEADS))


class Room:
    """The model, its tokenizer and a prompt."""

    def __init__(self, folder: Path, family: str = "random") -> None:
        demo = kvlens.load_model("demo" if family == "random" else family)
        self.tokenizer = demo.tokenizer
        if family == "random":
            torch.manual_seed(0)
            config = LlamaConfig(vocab_size=len(demo.tokenizer), eos_token_id=None, bos_token_id=1, **CONFIG)
            LlamaForCausalLM(config).save_pretrained(folder)
            demo.tokenizer.save_pretrained(folder)
            self.model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
        else:
            self.model = demo.model
        text = kvlens.sample("demo").text
        self.ids = self.tokenizer(text, return_tensors="pt")["input_ids"][:, :CONTEXT]
        self.question = self.tokenizer(" the code of", return_tensors="pt", add_special_tokens=False)["input_ids"]

    def generate(self, press: Any, case: Case) -> tuple[list[int], list[torch.Tensor], list[Any]]:
        """Generate as kvpress's own pipeline does -> (tokens, keys of every layer before the last pass, indices that
        are hidden by then)."""
        model, cache, context = self.model, DynamicCache(), self.ids
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None  # what an earlier press has left
        if isinstance(press, kvpress.FinchPress):
            mark = torch.full_like(context[:, :1], press.delimiter_token_id)
            context = torch.cat([context[:, :-8], mark, context[:, -8:]], 1)
        only_decoding = isinstance(press, kvpress.DecodingPress)
        grad = torch.enable_grad if isinstance(press, kvpress.KVgradPress) else torch.no_grad
        with grad(), nullcontext() if only_decoding or press is None else press(model):
            model.model(input_ids=context, past_key_values=cache)
        position, fed, chosen = self.ids.shape[1], self.question[:, : 1 if case.single else None], []
        if case.rotates:
            position = cache.get_seq_length()
        with torch.no_grad(), press(model) if case.decoding else nullcontext():
            for step in range(NEW):
                if step == NEW - 1:
                    keys = [layer.keys[0].clone() for layer in cache.layers]
                    hidden = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]
                at = torch.arange(position, position + fed.shape[1])[None]
                logits = model(fed, past_key_values=cache, position_ids=at, logits_to_keep=1).logits
                position, fed = position + fed.shape[1], logits[:, -1:].argmax(-1)
                chosen.append(int(fed))
        return chosen, keys, hidden


def kept(keys: list[torch.Tensor], hidden: list[Any], observer: Any) -> torch.Tensor:
    """Return which written positions lie in the cache and are not hidden: bool [L, H_kv, n]. Every key is compared with
    every written key."""
    rows = []
    for layer, held in enumerate(keys):
        written = observer.written[layer].keys
        same = (held[:, :, None] == written[:, None]).all(-1)
        if hidden[layer] is not None:
            _, head, place = hidden[layer]
            same[head, place] = False
        rows.append(same.any(1))
    return torch.stack(rows)


def compare(name: str, case: Case, room: Room) -> dict[str, Any]:
    """Run one press without and with observation and lay them side by side."""
    model, row = room.model, dict[str, Any](press=name, attention=case.attention)
    model.set_attn_implementation(case.attention)

    def made() -> Any:
        torch.manual_seed(0)
        press = case.make()
        if isinstance(press, kvpress.FinchPress):
            press.update_model_and_tokenizer(model, room.tokenizer)
        return press

    press = made()
    started = time.process_time()
    plain, _, _ = room.generate(press, case)
    plain_s = time.process_time() - started
    press = made()
    watch = Watch(model, room.tokenizer, compare=False)
    started = time.process_time()
    watch.open()
    try:
        chosen, keys, hidden = room.generate(press, case)
    finally:
        watch.leave()
    observer = watch.observer
    observed_s = time.process_time() - started
    observer.finish(None)
    last = observer.steps[-1]
    own, n = kept(keys, hidden, observer), observer.prompt_tokens
    entries = {kind: int(sum(step.kinds[kind] for step in observer.steps)) for kind in last.kinds if kind[0] != "u"}
    found = last.present
    row |= {
        "made": press_name(press),
        "tokens_equal": plain == chosen,
        "steps": len(observer.steps),
        "kept_tokens": int(found.sum()),
        "rule": "every key" if not case.alters else "count of entries",
        "kept_equal": bool((own[:, :, :n] == found).all())
        if not case.alters
        else _counts_equal(keys, hidden, observer),
        "exact": entries["exact"],
        "rotated": entries["rotated"],
        "rewritten": entries["rewritten"],
        "unmatched": entries["nothing"],
        "ambiguous": entries["ambiguous"],
        "largest_error": round(max(step.kinds["error"] for step in observer.steps), 4),
        "unmatched_mass": round(sum(step.kinds["unmatched"] for step in observer.steps) / len(observer.steps), 6),
        "output_error": float(f"{max(step.errors for step in observer.steps):.2g}"),
        "stopped": observer.stopped,
        "cpu_s": round(plain_s, 3),
        "observed_cpu_s": round(observed_s, 3),
    }
    return row


def _counts_equal(keys: list[torch.Tensor], hidden: list[Any], observer: Any) -> bool:
    """Every entry of the cache has a position in the last step."""
    last = observer.steps[-1]
    entries = sum(held.shape[0] * (held.shape[1] + 1) for held in keys)
    masked = sum(len(indices[0]) for indices in hidden if indices is not None)
    counted = sum(last.kinds[kind] for kind in ("exact", "rotated", "rewritten"))
    return last.kinds["nothing"] == 0 and entries - masked == counted


def all_presses() -> list[str]:
    """Return the presses that kvpress exports, its bases left out."""
    bases = kvpress.BasePress, kvpress.ScorerPress
    classes = {name: kind for name, kind in vars(kvpress).items() if inspect.isclass(kind)}
    return sorted(name for name, kind in classes.items() if issubclass(kind, bases[0]) and kind not in bases)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--model", default="random")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    missing = set(all_presses()) - set(CASES) - set(DOWNLOADS)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        room = Room(Path(folder), arguments.model)
        for name in arguments.only or sorted(CASES):
            case = CASES[name]
            try:
                row = compare(name, case, room)
            except Exception as error:
                row = {"press": name, "failed": f"{type(error).__name__}: {error}"[:200]}
            row["by_score"] = _lacks(getattr(kvpress, name)) == ""
            rows.append(row)
            print(json.dumps(row))
    result = {
        "kvpress": importlib.metadata.version("kvpress"),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "model": arguments.model,
        "context_tokens": CONTEXT,
        "rows": rows,
        "need_downloads": DOWNLOADS,
        "not_listed": sorted(missing),
    }
    arguments.target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    bad = [row["press"] for row in rows if not (row.get("tokens_equal") and row.get("kept_equal"))]
    raise SystemExit(f"not equal: {', '.join(bad)}" if bad or missing else 0)


if __name__ == "__main__":
    main()
