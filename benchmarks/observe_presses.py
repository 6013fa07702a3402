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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import kvpress
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvlens
from benchmarks.observe_caches import observe_caches
from benchmarks.observe_own import agrees, compare_own
from benchmarks.presscases import CASES, DOWNLOADS, KV_HEADS, LAYERS, Case
from kvlens.methods.kvpress import _lacks
from kvlens.observing.hooking import press_name
from kvlens.observing.options import Options
from kvlens.observing.watch import Watch
from kvlens.text.prompts import PromptText

CONTEXT, NEW = 160, 5
CHARACTERS = 700
"""of the prompt that kvlens runs itself"""
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
        grad = torch.enable_grad if isinstance(press, getattr(kvpress, "KVgradPress", ())) else torch.no_grad
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
    watch = Watch(model, room.tokenizer, Options(compare=False))
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


def own_rows(room: Room) -> list[dict[str, Any]]:
    """Return presses beside kvlens's own runs: of the random model, and of SmolLM2."""
    loaded, sample = kvlens.load_model("smollm2"), kvlens.sample()
    short = PromptText(kvlens.sample("demo").text[:CHARACTERS])
    return [
        *compare_own("random", room.model, room.tokenizer, short, NEW),
        *compare_own("smollm2", loaded.model, loaded.tokenizer, sample, NEW + 1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--model", default="random")
    parser.add_argument(
        "--source", default=importlib.metadata.version("kvpress"), help="name of the kvpress that ran, for the data"
    )
    parser.add_argument("--presses-alone", action="store_true", help="no caches, no runs of kvlens's own")
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
        room.model.set_attn_implementation("sdpa")
        pairs = [] if arguments.presses_alone else own_rows(room)
        caches = [] if arguments.presses_alone else observe_caches(room.tokenizer, room.ids)
    for row in (*pairs, *caches):
        print(json.dumps(row))
    result = {
        "kvpress": arguments.source,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "model": arguments.model,
        "context_tokens": CONTEXT,
        "rows": rows,
        "own": pairs,
        "caches": caches,
        "need_downloads": {name: needed for name, needed in DOWNLOADS.items() if hasattr(kvpress, name)},
        "not_listed": sorted(missing),
    }
    arguments.target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    bad = [row["press"] for row in rows if not (row.get("tokens_equal") and row.get("kept_equal"))]
    bad += [f"{row['method']} ({row['model']})" for row in pairs if not agrees(row)]
    bad += [row["cache"] for row in caches if not (row.get("tokens_equal", True) and row.get("all_found", True))]
    raise SystemExit(f"not equal: {', '.join(bad)}" if bad or missing else 0)


if __name__ == "__main__":
    main()
