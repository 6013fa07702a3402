"""CHESS's view: what each level of the hierarchy kept at each reconstruction, which pages were uncertain, what was
really attended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.figures.methods import chess as figures
from kvlens.app.figures.methods.chess import DUE, LEVELS, UNCERTAIN, Level, Reconstruction
from kvlens.app.ui.common import parts, sentences
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.method.journal import journal
from kvlens.store.reader import TraceReader
from kvlens.text.units import full_kv, si_bytes

WHY = {0: "no", UNCERTAIN: "yes: uncertain", DUE: "yes: its turn"}


@dataclass(frozen=True)
class Run:
    """What the figures draw, read once."""

    config: dict[str, object]
    found: tuple[Reconstruction, ...]
    pages: pd.DataFrame
    """one row per page completed while decoding: step, page, entropy_nats, varentropy_nats2, reconstructed (0, 1, 2)"""
    thresholds: tuple[float, float]
    """NaN: the trigger uses none"""
    share: np.ndarray
    """[steps], of the tokens in memory: attended, mean over layers and KV heads; NaN = not recorded"""

    @classmethod
    def read(cls, reader: TraceReader) -> Run:
        config = dict(reader.meta.config)
        names = {name: _by_step(reader, name) for name in reader.journal_names()}
        prompt = reader.prompt_tokens()
        attended = reader.kv_cube("attended_tokens")
        share = attended.mean((1, 2)) / (prompt + np.arange(len(attended)))
        reconstructions = tuple(
            _reconstruction(names, step, config, prompt) for step in sorted(names.get("safe_pages", {}))
        )
        columns = {
            "page": "page_completed",
            "entropy_nats": "page_entropy_nats",
            "varentropy_nats2": "page_varentropy_nats2",
            "reconstructed": "reconstructed",
        }
        steps = sorted(names.get("page_completed", {}))
        pages = pd.DataFrame(
            {"step": steps} | {key: [float(names[name][step][0]) for step in steps] for key, name in columns.items()}
        )
        limits = [
            names.get(f"threshold_{name}", {}).get(-1, [np.nan])[0] for name in ("entropy_nats", "varentropy_nats2")
        ]
        return cls(config, reconstructions, pages, (float(limits[0]), float(limits[1])), share)


def _by_step(reader: TraceReader, name: str) -> dict[int, np.ndarray]:
    frame = reader.journal(name)
    return {
        int(step): np.asarray(values, np.float64) for step, values in zip(frame["step"], frame["values"], strict=True)
    }


def _reconstruction(
    names: dict[str, dict[int, np.ndarray]], step: int, config: dict[str, object], prompt: int
) -> Reconstruction:
    page = int(str(config["page"]))
    chunk = page * int(str(config["chunk_pages"]))
    widths = (chunk * int(str(config["grid_chunks"])), chunk, page)
    levels = [
        Level(name, width, names[f"{name}_score"][step], names[f"{name}_kept"][step])
        for name, width in zip(LEVELS, widths, strict=True)
    ]
    safe = names["safe_pages"][step].astype(int).tolist()
    tokens = prompt - 1 if step < 0 else prompt + step - 1
    return Reconstruction(step, (levels[0], levels[1], levels[2]), (safe[0], safe[1], safe[2]), tokens)


def show(reader: TraceReader) -> None:
    """Summary in words, the hierarchy, then triggers beside the share attended, then tables."""
    run = Run.read(reader)
    st.text(in_words(reader, run))
    _hierarchy(reader, run)
    left_column, right = st.columns(2, gap="medium")
    with left_column:
        _triggers(reader, run)
    with right:
        _share(reader, run)
    journal(reader)


def in_words(reader: TraceReader, run: Run) -> str:
    """The run in a few sentences: what is attended, what stays resident, what moved."""
    steps = reader.steps()
    peak = None if steps.empty else float(steps["peak_bytes"].max())
    full = reader.meta.full_kv_bytes
    attended = (
        f"attended {np.nanmean(run.share):.2%} of the tokens in memory"
        if np.isfinite(run.share).any()
        else "shares attended not recorded"
    )
    moved = reader.transfer_times()
    size = ""
    if peak is not None and full:
        size = (
            f" All KV stays on the device: {si_bytes(peak)} at most, {peak / float(full):.1%} of "
            f"{full_kv(reader.meta.dtype)} with page vectors and tables."
        )
    copies = sentences.NOTHING_COPIED if moved.empty else f"{int(moved['n'].sum())} copies were made"
    return f"Per step {attended}.{size} One selection serves all layers and heads; {copies}."


def _hierarchy(reader: TraceReader, run: Run) -> None:
    st.markdown("##### What the hierarchy kept")
    if not run.found:
        st.info(sentences.NO_SELECTION)
        return
    names = {"end of prefill" if r.step < 0 else f"step {r.step}": r for r in run.found}
    choice = next(iter(names))
    if len(names) > 1:
        choice = str(st.select_slider("Reconstruction", list(names), key=f"chess_reconstruction_{reader.uid}"))
    parts.draw(
        reader,
        figures.strips(names[choice], needle_ranges(reader)),
        key="chess_strips",
        alt="Scores and kept units of grids, chunks and pages, by token position",
        data=table(run),
    )
    st.caption(
        "Scores are inner products of the query anchor, the mean of the window's page vectors, with each "
        "unit's vector (sec. 3.2, after "
        "Fig. 3). A unit without colour is not in the hierarchy. What a reconstruction keeps is attended until "
        "the next one; pages that "
        "leave the window meanwhile are not, unless kept."
    )


def needle_ranges(reader: TraceReader) -> list[tuple[int, int]]:
    """Token ranges [start, stop) of the prompt that hold what is asked for; [] where that is not known."""
    tokens = reader.tokens().dropna(subset=["char_start", "char_end"])
    ranges = []
    for start, stop in reader.meta.needle:
        inside = tokens.loc[(tokens["char_start"] < stop) & (tokens["char_end"] > start), "pos"]
        if len(inside):
            ranges.append((int(inside.min()), int(inside.max()) + 1))
    return ranges


def table(run: Run) -> pd.DataFrame:
    """One row per unit and reconstruction: step (-1: end of prefill), level, unit, tokens, score, kept."""
    rows = [
        {
            "step": r.step,
            "level": level.name,
            "unit": unit,
            "first_token": unit * level.width,
            "score": score,
            "kept": bool(is_kept),
        }
        for r in run.found
        for level in r.levels
        for unit, (score, is_kept) in enumerate(zip(level.score, level.kept, strict=True))
    ]
    return pd.DataFrame(rows)


def _triggers(reader: TraceReader, run: Run) -> None:
    st.markdown("##### When it was uncertain")
    pages = run.pages
    if pages.empty:
        st.info(sentences.NO_PAGE_COMPLETED)
        return
    entropy, varentropy = pages["entropy_nats"].to_numpy(), pages["varentropy_nats2"].to_numpy()
    if np.isfinite(entropy).any():
        parts.draw(
            reader,
            figures.uncertainty(
                pages["page"].astype(int).tolist(),
                entropy,
                varentropy,
                pages["reconstructed"].to_numpy(),
                run.thresholds,
            ),
            key="chess_uncertainty",
            alt="Mean entropy against varentropy of each page of generated tokens",
        )
    else:
        st.info("No page was filled by generated tokens alone, so none was judged.")
    st.caption(plain(trigger_words(run)))
    shown = pages.assign(reconstructed=[WHY.get(int(code), "not recorded") for code in pages["reconstructed"]])
    parts.download(shown, f"{reader.uid}-chess-pages")


def trigger_words(run: Run) -> str:
    """The rule, in one or two sentences."""
    rule = str(run.config.get("trigger"))
    if rule == "dynamic":
        both = "and" if run.config.get("condition") == "and" else "or"
        spread = (
            "variance of the page's entropies"
            if run.config.get("varentropy") == "page"
            else "mean varentropy of its distributions"
        )
        limits = f"above {run.thresholds[0]:.4g} nats {both} above {run.thresholds[1]:.4g} nats² (dashed)"
        text = f"A page triggers when its mean entropy and its varentropy ({spread}) are {limits}."
        longest = run.config.get("max_interval")
        text += f" After {longest} pages without one it is rebuilt anyway." if longest else ""
    else:
        text = {
            "fixed": f"Rebuilt every {run.config.get('interval')} pages, whatever the uncertainty.",
            "every": "Rebuilt at every page.",
            "never": sentences.NEVER_REBUILT,
        }.get(rule, "The trigger was not recorded.")
    return f"{text} A page that holds prompt tokens is not judged. After Fig. 4."


def _share(reader: TraceReader, run: Run) -> None:
    st.markdown("##### What was attended")
    if not np.isfinite(run.share).any():
        st.info("Tokens attended per step were not recorded in this run.")
        return
    parts.draw(
        reader,
        figures.attended_share(run.share, [r.step for r in run.found]),
        key="chess_share",
        alt="Share of tokens attended per step",
        data=pd.DataFrame({"step": np.arange(len(run.share)), "attended_share": run.share}),
    )
    st.caption(
        "Entries that entered the softmax, mean over layers and KV heads, of all tokens in memory: sinks and "
        "window counted. The paper's "
        "budgets (Table 1) are products of the three ratios."
    )
