"""Traces of the open format that tests import: written by the writer that engines copy, of made-up numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvlens.trace import Writer

LAYERS, Q_HEADS, KV_HEADS, PROMPT, STEPS, PAGE = 2, 4, 2, 40, 10, 8
SIZES = {"layers": LAYERS, "q_heads": Q_HEADS, "kv_heads": KV_HEADS}


def write_minimal(folder: Path, steps: int = STEPS, engine: str = "toy 0.1") -> Path:
    """The least: tokens, steps, spans and head-steps, of which only the masses by role are recorded."""
    writer = Writer(folder, engine=engine, block=4, **SIZES)
    writer.prompt(range(PROMPT), [f"t{i} " for i in range(PROMPT)])
    writer.span(0, 0, PROMPT, kind="window")
    for step in range(steps):
        writer.grid("head_step", mass_window=np.ones((LAYERS, Q_HEADS)))
        writer.step(step, f"o{step} ", t_us=1000 * step, dur_us=900, resident_bytes=1000, peak_bytes=1200)
    writer.close()
    return folder


def write_full(folder: Path, seed: int = 0, steps: int = STEPS) -> Path:
    """Every table: pages in host memory of which one by turns is not read, losses, rankings, copies and decisions."""
    rng = np.random.default_rng(seed)
    about = {"method": "top-k pages", "model": "toy", "parameters": {"page": PAGE}, "answer": "o7", "token_bytes": 256}
    sizes = {"head_dim": 8, "full_kv_bytes": 256 * (PROMPT + steps), "budget_bytes": 4096, "max_new": steps}
    writer = Writer(folder, engine="toy 0.1", block=4, dtype="float32", device="cpu", **SIZES, **about, **sizes)
    writer.prompt(range(PROMPT), [f"t{i} " for i in range(PROMPT)], surprisal=[None, *rng.random(PROMPT - 1)])
    for page in range(PROMPT // PAGE):
        writer.span(page, page * PAGE, (page + 1) * PAGE, state="cold", reason=f"A page of {PAGE} tokens.")
        form = {"form": "factors", "rank_k": 2, "rank_v": 3, "cold_bytes": 64, "err_k": 0.5, "err_v": float("inf")}
        writer.row("span_head", span=page, layer=0, kv_head=1, **form)
    writer.span(9, PROMPT - 1, PROMPT, kind="window")
    copied = {"direction": "d2h", "cause": "offload", "bytes": 512, "start_us": 1, "end_us": 5, "wait_us": 0}
    writer.row("transfer", step=-1, layer=0, span=0, blocking=False, **copied)
    writer.row("event", step=-1, kind="offload", span=0)
    heads = {"layer": 1, "kv_head": 0}
    for step in range(steps):
        tokens, left_out = PROMPT + step + 1, step % 3
        full = rng.dirichlet(np.ones(tokens), (LAYERS, Q_HEADS)).astype(np.float32)
        read = full.copy()
        read[..., left_out * PAGE : (left_out + 1) * PAGE] = 0
        writer.attention(read / read.sum(-1, keepdims=True), full=full)
        writer.compare(rng.normal(size=50), rng.normal(size=50), lambda token: f"v{token}")
        writer.grid(
            "kv_step", h2d_bytes=rng.integers(0, 99, (LAYERS, KV_HEADS)), similarity=rng.random((LAYERS, KV_HEADS))
        )
        taken = rng.random((LAYERS, KV_HEADS, 3)) < 0.5
        ranked = np.tile([2, 0, -1], (LAYERS, KV_HEADS, 1))
        counts = np.full((LAYERS, KV_HEADS), 5)
        writer.grid("kv_span", span=ranked, score=rng.normal(size=ranked.shape), chosen=taken, n_candidates=counts)
        writer.row("event", step=step, kind="recall", span=3, value=64.0, after_attention=False, **heads)
        copied |= {"direction": "h2d", "cause": "recall", "start_us": 1000 * step, "end_us": 1000 * step + 9}
        writer.row("transfer", step=step, layer=1, kv_head=0, span=3, blocking=True, **copied)
        writer.row("journal", step=step, name="threshold", values=[0.5, None])
        counted = {"candidates": 5, "asked": 3, "granted": 1, "refused": 1, "missed": 1, "score": 0.5, "cut": 0.25}
        lists = {"refused_span": [2], "missed_span": [1]}
        writer.row("decision", step=step, kind="recall", unit="spans", **heads, **counted, **lists)
        times = {"t_us": 1000 * step, "dur_us": 900, "wait_us": 3, "logprob": -0.5, "next_entropy": 1.25}
        writer.step(step, f"o{step} ", **times, resident_bytes=1000, peak_bytes=1200, cold_bytes=2048)
    writer.row("cut", step=-1, candidates=6, kept=4, cut=0.5, span=[1], dropped=[2], pos=[1], rank=[5], score=[0.25])
    phases = ("score_us", "plan_us", "copy_us", "wait_us", "attend_us", "record_us", "rest_us")
    writer.row("phase", step=0, **dict.fromkeys(phases, 1))
    writer.row("effect", step=0, lead=1.5, layer=0, kv_head=0, span=1, effect=0.5)
    writer.span_keys([0, 1, 9], rng.normal(size=(LAYERS, KV_HEADS, 3, 8)))
    writer.close(output_text=" ".join(f"o{step}" for step in range(steps)), stopped="length", reference_output="o7")
    return folder
