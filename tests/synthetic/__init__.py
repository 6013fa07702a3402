"""A made-up run, written through the real writer: for tests, benchmarks and work on the pages. Nothing in it was
measured.

Its meta says model 'synthetic'. It has the shape of a run of the usual method: sink, anchors, entropy spans in a cold
tier, a window; query heads whose interest wanders over the spans; spans that are zoomed into and left again; copies
that cost time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvlens import methods
from kvlens.meta import RunMeta
from kvlens.records import SelfCheck
from kvlens.store.writer import TraceWriter
from tests.synthetic.lens import LensMaker, span_keys
from tests.synthetic.scene import SINK, WINDOW, Scene, make_prefill
from tests.synthetic.steps import StepMaker


def write_synthetic(
    runs_dir: Path,
    layers: int = 6,
    q_heads: int = 8,
    kv_heads: int = 4,
    steps: int = 64,
    spans: int = 40,
    seed: int = 0,
    **meta: Any,
) -> str:
    """Writes a fake finished run and returns its uid. Keywords `uid`, `trace_level`, `top_k`, `prompt_tokens`,
    `status`, `error`, `writer_class` steer the writing; all others go into the run's meta.

    `lens=False`: a run without loss, full attention, effects and span keys. `loss_step`: where it first disagrees with
    the reference (three quarters through). Of the meta, `forced` says that losses go on after that, `oracle` which
    steps and layers have full attention.
    """
    rng = np.random.default_rng(seed)
    writer = meta.pop("writer_class", TraceWriter)(runs_dir, meta.pop("uid", None), meta.pop("trace_level", "spans"))
    top_k, n_prompt = int(meta.pop("top_k", 16)), int(meta.pop("prompt_tokens", 600))
    lens, loss_step = meta.pop("lens", True), int(meta.pop("loss_step", 3 * steps // 4))
    status, error = meta.pop("status", "completed"), meta.pop("error", None)
    scene = Scene(layers, q_heads, kv_heads, 64, rng)
    full = (n_prompt + steps) * layers * kv_heads * scene.token_bytes()
    placed, text = make_prefill(scene, n_prompt, spans)
    sampling = meta.setdefault("oracle", {"every": 1, "layers": list(range(layers))}) if lens else None
    prefill = replace(placed, span_keys=span_keys(scene, seed)) if lens else placed
    said = {
        "model": "synthetic",
        "method": methods.DEFAULT,
        "preset": "made up",
        "task": "synthetic",
        "device": "none",
        "dtype": "bfloat16",
        "config": {"window": WINDOW, "sink": SINK, "zoom_threshold": 0.08},
        "budget": "0.35",
        "prompt_tokens": n_prompt,
        "max_new": steps,
        "seed": seed,
        "forced": False,
        "layers": layers,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": scene.head_dim,
        "token_bytes": scene.token_bytes() * layers * kv_heads,
        "full_kv_bytes": full,
        "budget_bytes": int(0.35 * full),
        "link": "none (synthetic)",
        "prompt_text": text,
        "needle": [],
        "machine": {"processor": "none (synthetic)"},
        "oracle": None,
        "reference": None,
        "parent": None,
        "hold": [],
        "whatif": None,
    } | meta
    writer.begin(RunMeta.model_validate(said))
    writer.prefill(prefill)
    made = LensMaker(scene, seed, loss_step, bool(meta.get("forced")), sampling) if lens else None
    assert prefill.prefill_us is not None
    maker = StepMaker(scene, n_prompt, top_k, prefill.prefill_us, made)
    for step in range(steps):
        writer.step(maker.make(step))
    if made is not None:
        writer.effects(made.effects)
    check = SelfCheck("synthetic", True, None, "this run was made up by synthetic; nothing in it was measured")
    writer.finish(status, error, [check], {"synthetic": True})
    return writer.uid
