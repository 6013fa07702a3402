"""Reasons that only a method's own journal knows: CHESS's levels, CompressKV's token scores. (kind, sentence), or None:
not told there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvlens.store.reader import TraceReader

Told = tuple[str, str]


def chess(reader: TraceReader, step: int, layer: int, span: int, state: str | None, read: bool) -> Told | None:
    """The first level of the hierarchy (grid, chunk, page) at which the page was dropped at the newest reconstruction,
    and its rank among the units that were compared there: those under what the level above had kept."""
    row = reader.spans().set_index("span").loc[span]
    config = reader.meta.config
    if row["kind"] != "page" or state != "resident" or read:
        return None
    page, chunk_pages, grid_chunks = (int(config[name]) for name in ("page", "chunk_pages", "grid_chunks"))
    number = int(row["tok_start"]) // page
    units = {"grid": number // (chunk_pages * grid_chunks), "chunk": number // chunk_pages, "page": number}
    found = {
        level: (_newest(reader, f"{level}_kept", step), _newest(reader, f"{level}_score", step)[0]) for level in units
    }
    (of_pages, at), scores = found["page"]
    if of_pages is None or scores is None:
        return None
    when = "at the end of prefill" if at < 0 else f"at step {at}"
    if number >= len(scores) or np.isnan(scores[number]):
        return "below_the_cut", f"its page was not in the hierarchy that was reconstructed {when}"
    active: np.ndarray | None = None
    for level, width in zip(units, (grid_chunks, chunk_pages, 1), strict=True):
        (kept, _), score = found[level]
        if kept is None or score is None:
            return None
        compared = np.isfinite(score) if active is None else np.isfinite(score) & active[: len(score)]
        unit = units[level]
        if not kept[unit]:
            rank = int((score[compared] > score[unit]).sum()) + 1
            many = f"{int(compared.sum())} {level}s" + ("" if level == "grid" else " under what the level above kept")
            return "below_the_cut", (
                f"its {level} {unit} was dropped at the reconstruction {when}: rank {rank} of {many} by score, "
                f"{int(kept.sum())} kept"
            )
        active = np.repeat(kept > 0, width)
    return None


def compresskv(reader: TraceReader, step: int, layer: int, span: int, state: str | None, read: bool) -> Told | None:
    """How many of the span's tokens this layer kept, and where the best of the others stood."""
    row = reader.spans().set_index("span").loc[span]
    if state not in ("partial", "resident") or row["born_step"] >= 0:
        return None
    kept, _ = _newest(reader, "kept_tokens", step, layer)
    score, _ = _newest(reader, "token_score", step, layer)
    if kept is None or score is None:
        return None
    at = slice(int(row["tok_start"]), int(row["tok_end"]))
    dropped = kept[at] == 0
    if not dropped.any():
        return None
    ranked = np.isfinite(score)
    best = np.nanmax(np.where(dropped, score[at], np.nan))
    rank = int((score[ranked] > best).sum()) + 1
    where = (
        f"rank {rank} of {int(ranked.sum())} by the choosing heads' attention, {int((kept[ranked] == 1).sum())} kept"
    )
    return "partly_evicted", (
        f"{int(dropped.sum())} of its {len(dropped)} tokens were evicted at the end of prefill in this layer, "
        f"the best of them {where}"
    )


FROM_JOURNAL: dict[str, Callable[[TraceReader, int, int, int, str | None, bool], Told | None]] = {
    "chess": chess,
    "compresskv": compresskv,
}


def _newest(reader: TraceReader, name: str, step: int, layer: int | None = None) -> tuple[np.ndarray | None, int]:
    """The vector noted last up to a step (of a layer), and when; (None, -1) where there is none."""
    frame = reader.journal(name)
    frame = frame[frame["step"] <= step]
    if layer is not None:
        frame = frame[frame["layer"] == layer]
    if frame.empty:
        return None, -1
    last = frame.sort_values("step").iloc[-1]
    return np.asarray(last["values"], np.float64), int(last["step"])
