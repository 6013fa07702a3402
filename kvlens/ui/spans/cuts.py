"""The segmenters on one recorded text: what each method would cut, computed on the page's side from recorded tokens and
surprisals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from kvlens import methods
from kvlens.methods.sekv import layout as sekv_layout
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.shape import KVShape
from kvlens.spans import Span, Surprisal, fixed_chunks
from kvlens.store.reader import TraceReader
from kvlens.ui.memory.data import kv_shape


@dataclass(frozen=True)
class Text:
    """A stored run's prompt as methods want it (kvlens.methods.base.PromptFacts). The last prompt token, which step 0
    feeds, is left out: no method cuts it."""

    shape: KVShape
    prompt_tokens: int
    max_new: int
    budget_bytes: int | None
    model_name: str
    tokens: tuple[str, ...]
    surprisal: tuple[float, ...]
    """nats; NaN for token 0"""

    @classmethod
    def of(cls, reader: TraceReader, tokens: pd.DataFrame) -> Text:
        """`tokens` as the reader gives them."""
        meta, prompt = reader.meta, tokens[tokens["step"].isna()].iloc[:-1]
        return cls(
            kv_shape(reader),
            len(prompt),
            int(meta.max_new),
            meta.budget_bytes,
            str(meta.model),
            tuple(str(text) for text in prompt["text"]),
            tuple(prompt["surprisal"].to_numpy(np.float64, na_value=np.nan).tolist()),
        )

    @property
    def stats(self) -> Surprisal:
        """Mean and deviation of the recorded surprisals. Raises ValueError where some were not recorded."""
        return Surprisal.of(self.surprisal)


@dataclass(frozen=True)
class Cut:
    """One segmenter's spans."""

    name: str
    spans: tuple[Span, ...]
    settings: str
    """the parameters that made them, in words"""

    @property
    def edges(self) -> set[int]:
        """Tokens before which a span begins or after which one ends, the text's own ends left out."""
        return {edge for span in self.spans for edge in (span.tok_start, span.tok_end)} - {0}


#: Name on the page, method, parameters that differ from the run's preset, and the parameters that decide where it cuts.
SEGMENTERS: tuple[tuple[str, str, dict[str, Any], tuple[str, ...]], ...] = (
    (
        "entropy (SeKV)",
        "sekv",
        {"segmentation": "feasible"},
        ("alpha", "l_min", "l_max", "anchor_share", "sinks", "window"),
    ),
    ("entropy as printed (SeKV)", "sekv", {"segmentation": "paper"}, ("alpha", "l_min", "sinks", "window")),
    ("sentence chunks (SentKVCompress)", "sentkv", {}, ("length", "deviation", "marks", "sinks")),
    ("pages (FreeKV)", "freekv", {}, ("page", "sinks", "window")),
)


def own_parameters(reader: TraceReader) -> Any | None:
    """The parameters the run's method had; None when the method or one of them is not known here."""
    try:
        return methods.make_parameters(methods.get(str(reader.meta.method)), None, dict(reader.meta.config))
    except ValueError:
        return None


def own_cut(reader: TraceReader, text: Text) -> list[Span] | None:
    """The run's prompt cut again by its own method and parameters; None when they are not known here, or do not say."""
    params = own_parameters(reader)
    return None if params is None else methods.get(str(reader.meta.method)).segments(params, text, text.surprisal)


def preset_for(reader: TraceReader) -> str:
    """The preset by which the other methods cut: the demo model has settings of its own, other models the papers'."""
    return "demo" if str(reader.meta.model) in ("demo", "synthetic") else "paper"


def previews(reader: TraceReader, text: Text) -> list[Cut]:
    """What the segmenters make of the run's text, with their preset's parameters and the run's budget."""
    preset, found = preset_for(reader), []
    for name, method, changed, shown in SEGMENTERS:
        kind = methods.get(method)
        params = methods.make_parameters(kind, preset, changed)
        spans = kind.segments(params, text, text.surprisal)
        assert spans is not None, f"{method} says how it cuts"
        found.append(Cut(name, tuple(spans), settings(params, shown)))
    return [*found, *hierarchy(reader, text)]


def hierarchy(reader: TraceReader, text: Text) -> list[Cut]:
    """CHESS's pages, chunks and grids: of a CHESS run by its own parameters, else by the preset's."""
    chess = methods.get("chess")
    own = own_parameters(reader) if reader.meta.method == "chess" else None
    params = own or methods.make_parameters(chess, preset_for(reader), {})
    pages = chess.segments(params, text, text.surprisal) or []
    end = pages[-1].tok_end if pages else 0
    chunk = params.page * params.chunk_pages
    return [
        Cut("pages (CHESS)", tuple(pages), settings(params, ("page", "sink_pages", "window_pages"))),
        Cut("chunks (CHESS)", tuple(fixed_chunks(0, end, chunk)), settings(params, ("chunk_pages",))),
        Cut(
            "grids (CHESS)",
            tuple(fixed_chunks(0, end, chunk * params.grid_chunks, kind="grid")),
            settings(params, ("grid_chunks",)),
        ),
    ]


def settings(params: Any, names: Sequence[str]) -> str:
    """'alpha 1, l_min 8': parameters in words."""
    values = {name: getattr(params, name) for name in names}
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )


def entropy_parameters(reader: TraceReader) -> SeKVParameters:
    """SeKV's parameters for the what-if threshold: the run's own where it cut by surprisal, else the preset's."""
    own = own_parameters(reader) if reader.meta.method == "sekv" else None
    found = own if isinstance(own, SeKVParameters) and own.segmentation != "chunks" else None
    return found or methods.make_parameters(methods.get("sekv"), preset_for(reader), {})


def anchor_cap(params: SeKVParameters, text: Text) -> int | None:
    """Most anchors that the budget allows the entropy rule; None: it sets no such limit."""
    return sekv_layout.anchor_cap(params, text.shape, text.budget_bytes) if params.segmentation == "feasible" else None


def entropy_cut(params: SeKVParameters, text: Text, alpha: float) -> Cut:
    """The text cut by surprisal with another alpha, all else as it is."""
    params = replace(params, alpha=alpha)
    spans = methods.get("sekv").segments(params, text, text.surprisal) or []
    return Cut(f"alpha {alpha:g}", tuple(spans), settings(params, ("segmentation", "alpha", "l_min", "l_max")))


def crossed(edges: set[int], needle: Sequence[Sequence[int]]) -> list[int]:
    """Boundaries inside a needle [start, end): a token before each belongs to it, and the token after."""
    return sorted(edge for edge in edges for start, end in needle if start < edge < end)


def crossing_text(edges: Sequence[int], most: int = 4) -> str:
    """'811|812, 815|816': boundaries by the tokens on both sides; of more than `most`, how many there are."""
    more = f" and {len(edges) - most} more" if len(edges) > most else ""
    return ", ".join(f"{edge - 1}|{edge}" for edge in edges[:most]) + more
