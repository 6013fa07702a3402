"""The caches of transformers under `kvlens.observe`: tokens with and without, and what became of each key.

`benchmarks/observe_presses.py` calls `observe_caches` in the oracle's environment, `make observe-versions` runs this
file under every version of transformers: `python -m benchmarks.observe_caches TARGET`. A cache whose backend is not
installed, or that transformers itself refuses, has a row that names the reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    QuantizedCache,
    StaticCache,
)

import kvlens
from kvlens.observing.options import Options
from kvlens.observing.watch import Watch

NEW, BITS, RESIDUAL = 6, 4, 32
WINDOW = 48
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": 1,
}
BACKENDS = {"quanto": "optimum-quanto", "hqq": "hqq"}


def _quantised(backend: str) -> Callable[[Any], dict[str, Any]]:
    def keywords(model: Any) -> dict[str, Any]:
        axes = {"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}
        options = {"nbits": BITS, "residual_length": RESIDUAL, **axes}
        return {"past_key_values": QuantizedCache(backend, model.config, **options)}

    return keywords


CACHES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "DynamicCache": lambda model: {"past_key_values": DynamicCache()},
    "StaticCache": lambda model: {"past_key_values": StaticCache(config=model.config, max_cache_len=192)},
    "sliding-window layers": lambda model: {},
    "QuantizedCache, quanto": _quantised("quanto"),
    "QuantizedCache, HQQ": _quantised("hqq"),
    "offloaded": lambda model: {"cache_implementation": "offloaded"},
    "offloaded_static": lambda model: {"cache_implementation": "offloaded_static"},
}


def make_model(tokenizer: Any, windowed: bool, device: str) -> Any:
    """Return a small random decoder; windowed: all its layers attend the newest tokens alone."""
    torch.manual_seed(0)
    if windowed:
        mistral = MistralConfig(vocab_size=len(tokenizer), sliding_window=WINDOW, **SIZES)
        return MistralForCausalLM._from_config(mistral, attn_implementation="sdpa").eval().to(device)
    config = LlamaConfig(vocab_size=len(tokenizer), **SIZES)
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval().to(device)


def observe_cache(name: str, tokenizer: Any, ids: torch.Tensor, device: str) -> dict[str, Any]:
    """Generate without and with observation -> what was equal and what was found."""
    model = make_model(tokenizer, name.startswith("sliding"), device)

    def generate() -> torch.Tensor:
        settings = {"max_new_tokens": NEW, "do_sample": False, "disable_compile": True}
        result: torch.Tensor = model.generate(ids.to(device), **settings, **CACHES[name](model))
        return result

    plain = generate()
    watch = Watch(model, tokenizer, Options(compare=False))
    watch.open()
    try:
        tokens = generate()
    finally:
        watch.leave()
    observer = watch.observer
    observer.finish(watch._heard.sequence)
    kinds = {kind: int(sum(step.kinds[kind] for step in observer.steps)) for kind in observer.steps[0].kinds}
    last = observer.steps[-1]
    return {
        "tokens_equal": torch.equal(plain, tokens),
        "all_found": kinds["nothing"] == 0,
        "steps": len(observer.steps),
        **{kind: kinds[kind] for kind in ("exact", "rotated", "rewritten", "nothing")},
        "largest_error": round(max(step.kinds["error"] for step in observer.steps), 4),
        "device_bytes": sum(last.held),
        "host_bytes": last.elsewhere,
    }


def observe_caches(tokenizer: Any, ids: torch.Tensor, device: str = "cpu") -> list[dict[str, Any]]:
    """Return a row per cache."""
    rows = []
    for name in CACHES:
        row: dict[str, Any] = {"cache": name, "transformers": transformers.__version__, "device": device}
        backend = name.rpartition(" ")[2].lower() if name.startswith("QuantizedCache") else None
        if backend is not None:
            row["backend"] = _version(BACKENDS[backend])
        try:
            rows.append(row | observe_cache(name, tokenizer, ids, device))
        except (ImportError, AssertionError, RuntimeError, ValueError) as refusal:
            rows.append(row | {"refused": f"{type(refusal).__name__}: {refusal}".splitlines()[0][:160]})
    return rows


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(kvlens.PACKAGE / "demo" / "weights" / "tokenizer.json"))
    ids = tokenizer(kvlens.sample("demo").text, return_tensors="pt")["input_ids"][:, :160]
    rows = observe_caches(tokenizer, ids, arguments.device)
    arguments.target.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(json.dumps(row))
    raise SystemExit(any(not row.get("tokens_equal", True) or not row.get("all_found", True) for row in rows))


if __name__ == "__main__":
    main()
