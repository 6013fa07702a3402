"""What kvpress makes of a prompt, in an environment of its own (`make oracle`): run by benchmarks/oracle.py, which
writes the model and the questions and reads the answers.

`python oracle_presses.py FOLDER` reads FOLDER/model (a transformers folder), FOLDER/ids.npy and FOLDER/presses.json, a
list of {"name", "tokens", "press": [[class, fields], ...]}, the outer press first; writes FOLDER/NAME.npz with what the
innermost press scored, float32 [L, H_kv, n], what stayed, bool [L, H_kv, n], and the keys that were left in the cache,
in the order of their positions, float32 [L, H_kv, kept, D], where all KV heads keep as many; prints the versions as
JSON. Knows nothing of kvlens. No token of the prompt may come twice.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache


def build_press(parts: list[list[Any]]) -> Any:
    """The press; a press around another has it as its first field."""
    press = None
    for name, fields in reversed(parts):
        press = getattr(kvpress, name)(**fields) if press is None else getattr(kvpress, name)(press, **fields)
    return press


def scores(press: Any, model: Any, ids: torch.Tensor) -> tuple[np.ndarray, list[torch.Tensor]]:
    """The innermost press's scores [L, H_kv, n], and the values of every layer's cache, uncut."""
    while hasattr(press, "press"):
        press = press.press
    cache, source, hooks = DynamicCache(), {}, []

    def keep(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        source[module.layer_idx] = kwargs

    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(keep, with_kwargs=True))
    model(ids, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    rows = []
    for index, layer in enumerate(model.model.layers):
        lines, held = source[index], cache.layers[index]
        rows.append(
            press.score(layer.self_attn, lines["hidden_states"], held.keys, held.values, None, lines)[0].numpy()
        )
    return np.stack(rows), [held.values[0] for held in cache.layers]


def list_kept(
    press: Any, model: Any, ids: torch.Tensor, whole: list[torch.Tensor]
) -> tuple[np.ndarray, np.ndarray | None]:
    """What stays of a prompt that is read under the press: positions by their values, which no press changes."""
    cache = DynamicCache()
    with press(model):
        model(ids, past_key_values=cache)
    mask = np.zeros((len(whole), *whole[0].shape[:2]), bool)
    keys: list[torch.Tensor] = []
    for index, (layer, held) in enumerate(zip(model.model.layers, cache.layers, strict=True)):
        masked = getattr(layer.self_attn, "masked_key_indices", None)
        if masked is not None:
            mask[index] = True
            mask[index, masked[1].numpy(), masked[2].numpy()] = False
            continue
        same = (held.values[0][:, :, None] == whole[index][:, None]).all(-1)  # [H_kv, kept, n]
        assert (same.sum(-1) == 1).all(), "two tokens have the same values"
        mask[index] = same.any(1).numpy()
        order = same.int().argmax(-1).argsort(-1)
        keys.append(held.keys[0].gather(1, order[..., None].expand_as(held.keys[0])))
    alike = len(keys) == len(whole) and len({key.shape for key in keys}) == 1
    return mask, torch.stack(keys).numpy() if alike else None


@torch.no_grad()
def main(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa")
    ids = torch.tensor(np.load(folder / "ids.npy"))[None]
    for request in json.loads((folder / "presses.json").read_text(encoding="utf-8")):
        read = ids[:, : request["tokens"]]
        press = build_press(request["press"])
        score, whole = scores(press, model, read)
        mask, keys = list_kept(press, model, read, whole)
        path = folder / f"{request['name']}.npz"
        if keys is None:
            np.savez(path, score=score, kept=mask)
        else:
            np.savez(path, score=score, kept=mask, keys=keys)
    print(json.dumps({name: version(name) for name in ("kvpress", "transformers", "torch")}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
