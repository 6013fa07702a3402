"""CompressKV on the Method page: its retrieval heads, the tokens each layer may keep, and the ones it kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.figures.methods import compresskv as figures
from kvlens.app.figures.tokenstrip import token_strip
from kvlens.app.ui.common import parts, sentences
from kvlens.app.ui.common.widgets import plain
from kvlens.methods.compresskv.budget import ceiling_of
from kvlens.player.payload import needle_tokens
from kvlens.store.reader import TraceReader

STRIP = 40
"""tokens of the strip"""


def show(reader: TraceReader) -> None:
    """All sections, top to bottom."""
    _heads(reader)
    _budgets(reader)
    _tokens(reader)


def per_layer(reader: TraceReader, name: str) -> np.ndarray | None:
    """A vector per layer as [L, m], NaN where a layer has none; None when nothing was recorded."""
    frame = reader.journal(name)
    frame = frame[frame["layer"].notna()]
    if frame.empty:
        return None
    out = np.full((reader.n_layers, max(len(values) for values in frame["values"])), np.nan)
    for layer, values in zip(frame["layer"], frame["values"], strict=True):
        out[int(layer), : len(values)] = values
    return out


def over_layers(reader: TraceReader, name: str) -> np.ndarray | None:
    """A vector over layers [L]; None when it was not recorded."""
    frame = reader.journal(name)
    return None if frame.empty else np.asarray(frame["values"].iloc[0], np.float64)


def normalised(scores: np.ndarray) -> np.ndarray:
    """Scores [L, Hq] >= 0 as shares that add up to 1 over all heads; all zero stays zero."""
    total = np.nansum(scores)
    return scores / total if total > 0 else scores


def _heads(reader: TraceReader) -> None:
    st.markdown("##### Which heads retrieve")
    srh, trh, selector = (per_layer(reader, name) for name in ("srh_score", "trh_score", "selector"))
    config = _config(reader)
    if srh is None or trh is None:
        st.info(sentences.NO_HEAD_SCORES)
        return
    kind = st.radio(
        "Scores",
        ["share of all heads", "raw"],
        horizontal=True,
        key="compresskv_scores",
        help="Share: L1-normalised over all heads of all layers, as in the paper's Figure 9.",
    )
    share = kind != "raw"
    maps = [("Traditional retrieval heads (top-1 rule)", trh), ("Semantic retrieval heads (eq. 1)", srh)]
    shown = [(title, normalised(values) if share else values) for title, values in maps]
    selected = np.zeros(srh.shape, bool) if selector is None else selector > 0
    group = reader.q_heads // reader.kv_heads
    layers, heads = np.indices(srh.shape)
    frame = pd.DataFrame(
        {
            "layer": layers.ravel(),
            "q_head": heads.ravel(),
            "kv_head": heads.ravel() // group,
            "srh_score": srh.ravel(),
            "trh_score": trh.ravel(),
            "chose": selected.ravel(),
        }
    )
    parts.draw(
        reader,
        figures.head_maps(shown, group, selected, "share" if share else "score", share),
        key="compresskv_heads",
        alt="Traditional and semantic retrieval scores by layer and query head",
        data=frame,
    )
    raw = (
        ""
        if share
        else " Raw scores: left, share of the answer copied; right, attention mass summed over the answer's steps."
    )
    chance = over_layers(reader, "srh_chance")
    if chance is not None:
        by_chance = float(chance[0]) / (float(np.nansum(srh)) or 1.0) if share else float(chance[0])
        raw += (
            f" A head that attends every token alike would score {by_chance:.2g} on the right: less than that "
            f"is no retrieval."
        )
    st.caption(
        plain(
            "As the paper's Figure 9, from the calibration of this model. Outlined: the heads that chose the "
            "tokens in this run "
            f"(heads={config.get('heads', 'not recorded')}, at most {config.get('top_heads', '?')} per layer).{raw}"
        )
    )


def _budgets(reader: TraceReader) -> None:
    st.markdown("##### What each layer may keep")
    tokens, errors, config = (
        over_layers(reader, "layer_budget_tokens"),
        over_layers(reader, "layer_error"),
        _config(reader),
    )
    if tokens is None:
        st.info("Layer budgets were not recorded in this run.")
        return
    total, n = int(tokens.sum()), reader.prompt_tokens() - (0 if _last_counts(config) else 1)
    floor = min(int(config.get("floor", 0)), n)
    most = max(ceiling_of(total, len(tokens), float(config.get("ceiling", 1)), n), floor)
    used = config.get("layers") == "error"
    columns: dict[str, Any] = {"layer": range(len(tokens)), "prompt_tokens_kept": tokens.astype(int)}
    frame = pd.DataFrame(columns if errors is None else columns | {"layer_error": errors})
    parts.draw(
        reader,
        figures.layer_budgets(tokens, errors, floor, most),
        key="compresskv_budgets",
        alt="Prompt tokens kept by layer",
        data=frame,
    )
    rule = "in proportion to the error above the floor" if used else "the same for every layer (layers=equal)"
    errors_said = "" if errors is not None else sentences.NO_LAYER_ERRORS
    st.caption(
        plain(
            f"Sec. 3.4: {total:,} tokens over {len(tokens)} layers, {rule}, within the floor m and the ceiling "
            f"M (never more than the "
            f"prompt's {n:,}). Window included; decoded tokens come on top and stay. The paper prints no such "
            f"figure.{errors_said}"
        )
    )


def _tokens(reader: TraceReader) -> None:
    st.markdown("##### Which tokens were kept")
    retained, scores = per_layer(reader, "kept_tokens"), per_layer(reader, "token_score")
    if retained is None:
        st.info("Kept tokens were not recorded in this run.")
        return
    tokens = reader.tokens()
    n = retained.shape[1]
    texts = [str(text) for text in tokens["text"][:n]]
    needles = [(int(a), int(b)) for a, b in needle_tokens(tokens[tokens["step"].isna()], reader.meta.needle)]
    window_from = n if scores is None else int(np.isfinite(scores[0]).sum())
    last_said = (
        (sentences.LAST_TOKEN_IN_WINDOW)
        if _last_counts(_config(reader))
        else (
            "The last prompt token is fed at step 0; this run counts it neither in the window nor among the "
            "tokens kept (peek=false)."
        )
    )
    layers, positions = np.nonzero(retained)
    frame = pd.DataFrame({"layer": layers, "position": positions, "text": [texts[p] for p in positions]})
    parts.draw(
        reader,
        figures.kept_map(retained, needles, texts, window_from),
        key="compresskv_kept",
        alt="Prompt tokens kept by layer",
        data=frame,
    )
    st.caption(
        plain(
            f"All KV heads of a layer keep the same tokens. {_needle_text(retained, needles)} Drag to zoom, "
            f"double-click to come back. "
            f"{last_said} The paper prints no such figure; its Figure 3 draws the idea."
        )
    )
    last = max(0, n - STRIP)
    start = min(max(0, needles[0][0] - 10), last) if needles else last
    if last:
        start = int(st.slider("Strip begins at position", 0, last, start, key=f"compresskv_strip_{reader.uid}"))
    part = slice(start, start + STRIP)
    parts.draw(
        reader,
        token_strip(retained[:, part], None if scores is None else scores[:, part], start, texts[part], needles),
        key="compresskv_strip",
        alt="Kept tokens with their texts",
        data=_strip(retained, scores, part, texts),
    )
    st.caption(
        "Tokens with their texts, one row per layer. Point at a cell for the pooled attention score by which "
        "it was kept or dropped."
    )


def _strip(retained: np.ndarray, scores: np.ndarray | None, part: slice, texts: list[str]) -> pd.DataFrame:
    """One row per layer and token of the strip; the pooled score is empty where none was recorded, as in the window."""
    layers, places = np.indices(retained[:, part].shape)
    positions = (places + part.start).ravel()
    score = np.full(layers.size, np.nan) if scores is None else scores[:, part].ravel()
    columns = {
        "layer": layers.ravel(),
        "position": positions,
        "text": [texts[p] for p in positions],
        "kept": retained[:, part].ravel() > 0,
    }
    return pd.DataFrame({**columns, "pooled_score": score})


def _needle_text(retained: np.ndarray, needles: list[tuple[int, int]]) -> str:
    """How much of the needle is left, by layer."""
    positions = [p for a, b in needles for p in range(a, b) if p < retained.shape[1]]
    if not positions:
        return "Where the answer stands is not known for this prompt."
    counts = retained[:, positions].sum(1).astype(int)
    return (
        f"Of the needle's {len(positions)} tokens the layers kept "
        f"{', '.join(f'L{layer}: {count}' for layer, count in enumerate(counts))}."
    )


def _config(reader: TraceReader) -> dict[str, Any]:
    return dict(reader.meta.config)


def _last_counts(config: dict[str, Any]) -> bool:
    """The last prompt token was one of the window. Traces from before there was the parameter: it was not."""
    return bool(config.get("peek", False))
