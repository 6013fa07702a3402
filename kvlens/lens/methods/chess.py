"""Why CHESS did not attend a page: the level of its hierarchy at which the page was dropped."""

from __future__ import annotations

import numpy as np

from kvlens.lens.facts import Facts
from kvlens.lens.method_reasons import Told, read_newest


def told(facts: Facts) -> Told | None:
    """The first level of the hierarchy (grid, chunk, page) at which the page was dropped at the newest reconstruction,
    and its rank among the units that were compared there: those under what the level above had kept."""
    reader, step = facts.reader, facts.step
    row = reader.span(facts.span)
    config = reader.meta.config
    if row.kind != "page" or facts.state != "resident" or facts.read:
        return None
    page, chunk_pages, grid_chunks = (int(config[name]) for name in ("page", "chunk_pages", "grid_chunks"))
    number = row.tok_start // page
    units = {"grid": number // (chunk_pages * grid_chunks), "chunk": number // chunk_pages, "page": number}
    results = {
        level: (read_newest(reader, f"{level}_kept", step), read_newest(reader, f"{level}_score", step)[0])
        for level in units
    }
    (of_pages, position), scores = results["page"]
    if of_pages is None or scores is None:
        return None
    when = "at the end of prefill" if position < 0 else f"at step {position}"
    if number >= len(scores) or np.isnan(scores[number]):
        return "below_the_cut", f"its page was not in the hierarchy that was reconstructed {when}"
    active: np.ndarray | None = None
    for level, width in zip(units, (grid_chunks, chunk_pages, 1), strict=True):
        (kept_tokens, _), score = results[level]
        if kept_tokens is None or score is None:
            return None
        compared = np.isfinite(score) if active is None else np.isfinite(score) & active[: len(score)]
        unit = units[level]
        if not kept_tokens[unit]:
            rank = int((score[compared] > score[unit]).sum()) + 1
            many = f"{int(compared.sum())} {level}s" + ("" if level == "grid" else " under what the level above kept")
            return "below_the_cut", (
                f"its {level} {unit} was dropped at the reconstruction {when}: rank {rank} of {many} by score, "
                f"{int(kept_tokens.sum())} kept"
            )
        active = np.repeat(kept_tokens > 0, width)
    return None
