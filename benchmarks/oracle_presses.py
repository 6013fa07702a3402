"""What kvpress makes of a prompt, in an environment of its own (`make oracle`): run by benchmarks/oracle.py, which
writes the model and the questions and reads the answers.

`python oracle_presses.py FOLDER` reads FOLDER/model (a transformers folder), FOLDER/ids.npy, FOLDER/filters.npy (of
Q-Filters, float32 [L, H_kv, D]) and FOLDER/presses.json, a list of {"name", "tokens", "press": [[class, fields], ...]},
the outer press first; writes FOLDER/NAME.npz with what the innermost press scored, float32 [L, H_kv, n], NaN where it
has no score, what stayed, bool [L, H_kv, n], or of a press that prunes channels the channels that stayed, bool
[L, H_kv, D], and the keys that were left in the cache, in the order of their positions, float32 [L, H_kv, kept, D],
where all KV heads keep as many; prints the versions as JSON. Knows nothing of kvlens. No token of the prompt may come
twice.

Three presses ask for what is not there, and get a stand-in: KVzip and FINCH a tokenizer (text is one token a byte, and
the separator before FINCH's question is the token 2), Q-Filters downloaded filters.
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
from kvpress.presses import kvzip_press
from transformers import AutoModelForCausalLM, DynamicCache

SEPARATOR, WINDOW = 2, "question_tokens"
"""token before FINCH's question; the field of a request that counts the question's tokens"""


class Bytes:
    """A tokenizer whose tokens are bytes, in the place of the model's."""

    chat_template = None

    @classmethod
    def from_pretrained(cls, name: str) -> Bytes:
        return cls()

    def encode(self, text: str, return_tensors: str = "pt", add_special_tokens: bool = False) -> torch.Tensor:
        return torch.tensor([[3 + byte for byte in text.encode()]], dtype=torch.long)


class KeptScores(kvpress.KVzipPress):
    """KVzip, whose scores stay when it has cut."""

    def compress_post(self, model: Any) -> None:
        self.last_scores = self.score_val[:, 0].clone()
        super().compress_post(model)


class GivenFilters(kvpress.QFilterPress):
    """Q-Filters with filters of FOLDER/filters.npy. The authors' filters point away from the queries."""

    filters: torch.Tensor

    def post_init_from_model(self, model: Any) -> None:
        self.q_filters = -self.filters


STAND_INS = {"KVzipPress": KeptScores, "QFilterPress": GivenFilters}


def build_press(parts: list[list[Any]]) -> Any:
    """The press; a press around another has it as its first field."""
    press = None
    for name, fields in reversed(parts):
        press_class = STAND_INS.get(name) or getattr(kvpress, name)
        press = press_class(**fields) if press is None else press_class(press, **fields)
    if isinstance(press, kvpress.FinchPress):
        press.delimiter_token_id = SEPARATOR
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
    whole = [layer.values[0] for layer in cache.layers]
    if not hasattr(press, "score") or isinstance(press, kvpress.FinchPress):
        return np.full((len(whole), *whole[0].shape[:2]), np.nan, np.float32), whole
    press.post_init_from_model(model)
    rows = []
    for index, layer in enumerate(model.model.layers):
        lines, held = source[index], cache.layers[index]
        rows.append(
            press.score(layer.self_attn, lines["hidden_states"], held.keys, held.values, None, lines)[0].numpy()
        )
    return np.stack(rows), whole


def list_kept(
    press: Any, model: Any, ids: torch.Tensor, whole: list[torch.Tensor]
) -> tuple[np.ndarray, np.ndarray | None]:
    """What stays of a prompt that is read under the press: positions by their values, which no press changes."""
    cache = DynamicCache()
    with press(model):
        model(ids, past_key_values=cache)
    if isinstance(press, kvpress.ThinKPress):
        return np.stack([(layer.keys[0] != 0).any(1).numpy() for layer in cache.layers]), None
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
    kvzip_press.AutoTokenizer = Bytes
    GivenFilters.filters = torch.tensor(np.load(folder / "filters.npy"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa")
    ids = torch.tensor(np.load(folder / "ids.npy"))[None]
    for request in json.loads((folder / "presses.json").read_text(encoding="utf-8")):
        read = ids[:, : request["tokens"]]
        press = build_press(request["press"])
        score, whole = scores(press, model, read)
        if isinstance(press, kvpress.FinchPress):
            context = read.shape[1] - request[WINDOW]
            read = torch.cat([read[:, :context], torch.tensor([[SEPARATOR]]), read[:, context:]], 1)
        mask, keys = list_kept(press, model, read, whole)
        if isinstance(press, KeptScores):
            score = press.last_scores.numpy()
        path = folder / f"{request['name']}.npz"
        if keys is None:
            np.savez(path, score=score, kept=mask)
        else:
            np.savez(path, score=score, kept=mask, keys=keys)
    print(json.dumps({name: version(name) for name in ("kvpress", "transformers", "torch")}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
