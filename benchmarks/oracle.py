"""The second oracle: what methods score and keep of a prompt, against kvpress in an environment of its own.

`make oracle` makes that environment (.oracle, by requirements-oracle.txt; the package index is asked) and runs
`python -m benchmarks.oracle .oracle/bin/python kvlens/lab/results/oracle.json`. A random Llama and a random prompt are
written to a temporary folder; kvpress reads them there (oracle_presses.py) and leaves its scores, what stayed and the
keys in its cache; kvlens does the same here, and the two are laid side by side. Fails where a case is off that is
expected to agree. Presses run inside kvlens (`kvpress:NAME`) are laid beside themselves, if kvpress can be imported
here with that environment's packages behind kvlens's own.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.oraclecases import CASES, INSIDE, UNRANKED
from benchmarks.oracleforms import CHUNK, CONFIG, WINDOW, Case, N
from benchmarks.standins import NoTokenizer, drawn_filters, kept_channels
from kvlens import methods
from kvlens.engine.engine import Engine, Options
from kvlens.engine.hf_attention import ATTENTION
from kvlens.engine.loop import Generation
from kvlens.engine.models import LoadedModel, shape_of
from kvlens.engine.session import Session
from kvlens.methods.base import Method
from kvlens.methods.kvpress import NoPress
from kvlens.text.chat import ChatForm
from kvlens.text.prompts import Prompt, PromptText

CLOSE = 1e-5
"""largest difference of scores, as a share of the largest score, that float32 in another order may make"""


@dataclass
class Made:
    """What a side came to: score float [L, H_kv|1, n] (NaN: not ranked), kept bool [L, H_kv, n], keys of layer 0 in
    the cache [H_kv, kept, D]."""

    score: np.ndarray
    kept: np.ndarray
    keys: np.ndarray | None = None


def load(folder: Path) -> LoadedModel:
    """The random model, written for the others and loaded from there."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder / "model")
    model = LlamaForCausalLM.from_pretrained(folder / "model", attn_implementation=ATTENTION, dtype=torch.float32)
    model.eval().requires_grad_(False)
    return LoadedModel("random", model, NoTokenizer(), shape_of(model.config, 4), 2048, True, frozenset())


def note_scores(method: type[Method], scores: dict[int, torch.Tensor], counts: list[int] | None) -> type[Method]:
    """The method, whose scores are noted, and which keeps so many tokens in each layer, if that is said."""

    def placed(self: Any, layer: int, score: torch.Tensor, mask: torch.Tensor) -> None:
        scores[layer] = score

    def worth(self: Any, prompt: Any, layer: int) -> torch.Tensor:
        scores[layer] = method.worth(self, prompt, layer)  # type: ignore[attr-defined]
        return scores[layer]

    hooks: dict[str, Any] = {"placed": placed} if hasattr(method, "placed") else {"worth": worth}
    if counts is not None:
        hooks["tokens"] = lambda self, prompt, total: [[count] for count in counts]
    return type(method.__name__, (method,), hooks)


def ours(loaded: LoadedModel, fed: tuple[int, ...], case: Case, counts: list[int] | None = None) -> Made:
    """Of a prompt without its last token, or, where the method peeks, with it."""
    scores: dict[int, torch.Tensor] = {}
    method, n = note_scores(methods.get(case.method), scores, counts), len(fed) - (not case.peeks)
    prompt = Prompt(PromptText("x"), fed, ("",) * len(fed), (None,) * len(fed), ChatForm("", "\n"))
    options = Options(max_new=2)
    context = Engine(loaded).context(prompt, None, options)
    session = Session(method, methods.make_parameters(method, None, case.params), context)
    with torch.inference_mode():
        Generation(loaded, prompt, session, options).place(None)
    shape, hot = loaded.shape, session.memory.hot
    packed = session.memory.layout.quantised
    if packed is not None:
        session.close()
        return Made(np.full(0, np.nan), kept_channels(packed.kept_channels, shape.head_dim))
    kept_mask = np.zeros((shape.layers, shape.kv_heads, n), bool)
    for layer, head in np.ndindex(shape.layers, shape.kv_heads):
        pool = hot.pool(layer, head)
        position = pool.slots(layer).position[head - pool.heads.start]
        kept_mask[layer, head, position[position >= 0].numpy()] = True
    if case.peeks:
        kept_mask[..., -1] = True  # step 0 brings it
    keys = first_keys(session, context.rotate) if session.memory.distance is not None else None
    session.close()
    score = torch.stack([scores[layer].expand(len(scores[0]), -1) for layer in range(shape.layers)])
    return Made(score[..., :n].numpy(), kept_mask, keys)


def first_keys(session: Session, rotate: Any) -> np.ndarray:
    """Keys of the first layer as attention sees them, moved together so that the first of them lies at 0."""
    slots, n = session.memory.hot.slots(0), session.context.prompt_tokens
    near = session.memory.distance.rotate_slots(slots, 0, n, slots.role.shape[1])  # type: ignore[union-attr]
    order = torch.where(slots.position < 0, n, slots.position).argsort(1)[:, : int((slots.position[0] >= 0).sum())]
    keys = near.keys.gather(1, order[..., None].expand(-1, -1, near.keys.shape[-1]))
    return rotate(keys, torch.full((keys.shape[1],), n - keys.shape[1]), 0, back=True).numpy()


def laid_beside(case: Case, own_rows: Made, theirs: Made) -> dict[str, Any]:
    """A row of the result."""
    layers = slice(0, case.layers)
    row: dict[str, Any] = {"method": case.method, "params": case.params, "press": case.press}
    if case.name not in UNRANKED:
        a, b = own_rows.score[layers], theirs.score[layers] * case.times
        if case.chunk:
            previous = N - WINDOW
            a, b = (x[..., :previous:CHUNK] for x in (a, chunk_means(b[..., :previous], case.chunk)))
        ranked = np.isfinite(a) & (np.arange(a.shape[-1]) < ranked_until(case, a.shape[-1]))
        b = np.broadcast_to(b, a.shape)
        row["scores_differ_at_most"] = float(np.abs(a - b)[ranked].max())
        row["largest_score"] = float(np.abs(b)[ranked].max())
    if own_rows.keys is not None and theirs.keys is not None:
        row["keys_differ_at_most"] = float(np.abs(own_rows.keys - theirs.keys).max())
        row["largest_key"] = float(np.abs(theirs.keys).max())
    row["kept"] = int(own_rows.kept[layers].sum())
    row["kept_there"] = int(theirs.kept[layers].sum())
    row["kept_by_both"] = int((own_rows.kept & theirs.kept)[layers].sum())
    row["sets_equal"] = bool((own_rows.kept == theirs.kept)[layers].all())
    return row | {"layers": case.layers or len(own_rows.kept), "expected": case.expected, "note": case.why}


def chunk_means(score: np.ndarray, chunk: int) -> np.ndarray:
    means = score.sum(1, keepdims=True).reshape(len(score), 1, -1, chunk).mean(-1)
    return np.repeat(means, chunk, -1)


def ranked_until(case: Case, positions: int) -> int:
    """Positions from there on are protected by the press or the method, whatever they score."""
    return positions if case.chunk else N - WINDOW if case.peeks else N - 2 if case.method == "tova" else positions


def agrees(row: dict[str, Any]) -> bool:
    for subject in ("score", "key"):
        if row.get(f"{subject}s_differ_at_most", 0) > CLOSE * row.get(f"largest_{subject}", 0):
            return False
    return bool(row["sets_equal"]) == (row["expected"] == "equal")


def inside(
    loaded: LoadedModel, fed: tuple[int, ...], theirs: dict[str, Made], python: Path
) -> list[dict[str, Any]] | str:
    """Presses run by kvlens itself, against what they kept there; a sentence where kvpress cannot be imported here."""
    sys.path += [str(path) for path in python.parent.parent.glob("lib/python*/site-packages")]
    try:
        return [laid_beside(case, ours(loaded, fed, case), theirs[case.name]) for case in INSIDE]
    except NoPress as error:
        return str(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path, help="of the environment that has kvpress")
    parser.add_argument("out", type=Path, help="file of the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        loaded = load(folder)
        # no token twice: what stayed there is found again by its values, which tell tokens of the first layer apart
        ids = np.random.default_rng(0).permutation(np.arange(3, CONFIG["vocab_size"]))[:N]
        np.save(folder / "ids.npy", ids)
        every = (*CASES, *INSIDE)
        np.save(folder / "filters.npy", drawn_filters(loaded.shape))
        request = [
            {"name": c.name, "tokens": N - (not c.peeks), "press": c.press, "question_tokens": WINDOW} for c in every
        ]
        fed = tuple(ids.tolist())
        (folder / "presses.json").write_text(json.dumps(request), encoding="utf-8")
        presses = Path(__file__).with_name("oracle_presses.py")
        completed = subprocess.run([options.python, presses, folder], capture_output=True, text=True)
        if completed.returncode:
            print(completed.stderr[-3000:], file=sys.stderr)
            return 1
        theirs = {}
        for item in request:
            with np.load(folder / f"{item['name']}.npz") as results:
                keys = results["keys"][0] if "keys" in results else None
                theirs[str(item["name"])] = Made(results["score"], results["kept"], keys)
        rows = []
        for case in CASES:
            present = theirs[case.name]
            counts = present.kept[:, 0].sum(-1).tolist() if case.counts else None
            rows.append(laid_beside(case, ours(loaded, fed, case, counts), present))
        pressed = inside(loaded, fed, theirs, options.python)
    compared = rows + (pressed if isinstance(pressed, list) else [])
    here = {"transformers": transformers.__version__, "torch": torch.__version__, "python": platform.python_version()}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"here": here, "there": json.loads(completed.stdout.splitlines()[-1])},
        "model": CONFIG,
        "prompt_tokens": N,
        "agrees": all(map(agrees, compared)),
        "methods": rows,
        "presses_inside": pressed,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in compared:
        sentence = (
            f"{row['scores_differ_at_most']:.1e} of {row['largest_score']:.3g}" if "largest_score" in row else "none"
        )
        alike = "equal" if row["sets_equal"] else f"{row['kept_by_both']} of {row['kept']} alike"
        print(f"{'ok ' if agrees(row) else 'OFF'} {row['method']:32} scores {sentence:22} kept: {alike}  {row['note']}")
    if isinstance(pressed, str):
        print(f"presses inside kvlens were not run: {pressed}")
    return 0 if result["agrees"] else 1


if __name__ == "__main__":
    sys.exit(main())
