"""The segmenters on one recorded text: what each method would cut, computed on the page's side from recorded tokens and
surprisals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from kvlens import methods
from kvlens.methods import Method
from kvlens.methods.fitting import Chosen, Sizes, choose
from kvlens.methods.naming import installed
from kvlens.methods.segmenter import Segmenter
from kvlens.runs.request import default_preset
from kvlens.shape import KVShape
from kvlens.spans import Span, Surprisal
from kvlens.store.reader import TraceReader


@dataclass(frozen=True)
class Text:
    """A stored run's prompt as methods want it (kvlens.methods.segmenter.PromptFacts). The last prompt token, which
    step 0 feeds, is left out: no method cuts it."""

    shape: KVShape
    prompt_tokens: int
    max_new: int
    budget_bytes: int | None
    model_name: str
    tokens: tuple[str, ...]
    surprisal: tuple[float, ...]
    """nats; NaN for token 0"""

    @classmethod
    def read(cls, reader: TraceReader, tokens: pd.DataFrame) -> Text:
        """Return the text of a run. tokens: the reader's. Raises NotRecorded if the trace lacks a size."""
        meta, prompt = reader.meta, tokens[tokens["step"].isna()].iloc[:-1]
        return cls(
            reader.kv_shape(),
            len(prompt),
            reader.max_new(),
            meta.budget_bytes,
            str(meta.model),
            tuple(str(text) for text in prompt["text"]),
            tuple(prompt["surprisal"].to_numpy(np.float64, na_value=np.nan).tolist()),
        )

    @property
    def stats(self) -> Surprisal:
        """Mean and deviation of the recorded surprisals. Raises ValueError where some were not recorded."""
        return Surprisal.measure(self.surprisal)


@dataclass(frozen=True)
class Cut:
    """One segmenter's spans."""

    name: str
    spans: tuple[Span, ...]
    settings: str
    """the parameters that made them, in words"""
    preset: str = ""
    """whose numbers they are: a preset's; '': those of the run"""

    @property
    def edges(self) -> set[int]:
        """Tokens before which a span begins or after which one ends, the text's own ends left out."""
        return {edge for span in self.spans for edge in (span.tok_start, span.tok_end)} - {0}


def own_parameters(reader: TraceReader) -> Any | None:
    """The parameters the run's method had; None when the method or one of them is not known here."""
    method = installed(str(reader.meta.method))
    try:
        return None if method is None else methods.make_parameters(method, None, dict(reader.meta.config))
    except ValueError:
        return None


def own_cut(reader: TraceReader, text: Text) -> list[Span] | None:
    """The run's prompt cut again by its own method and parameters; None when they are not known here, or do not say."""
    params = own_parameters(reader)
    return None if params is None else methods.get(str(reader.meta.method)).segments(params, text, text.surprisal)


def previews(reader: TraceReader, text: Text) -> list[Cut]:
    """What the segmenters of all methods make of the run's text under its budget: with the parameters a run of them
    would have, the preset's or, where these do not fit the prompt, `fit`; its own method's with the run's parameters,
    unless the segmenter sets some."""
    cuts = []
    for method in methods.registry().values():
        for segmenter in method.segmenters:
            own_mask = reader.meta.method == method.name and not segmenter.changes
            own_settings = own_parameters(reader) if own_mask else None
            if own_settings is not None:
                cuts.append(_cut(method, segmenter, own_settings, text))
                continue
            choice = _usual(reader, method, segmenter, text)
            cuts.append(replace(_cut(method, segmenter, choice.params, text), preset=choice.preset or "defaults"))
    return cuts


def _usual(reader: TraceReader, method: type[Method], segmenter: Segmenter, text: Text) -> Chosen:
    """The parameters that a run of the method on this text would have, but for what the segmenter sets."""
    model = "demo" if str(reader.meta.model) == "synthetic" else str(reader.meta.model)
    sizes = Sizes(text.shape, text.prompt_tokens, text.max_new, text.budget_bytes)
    return choose(method, None, default_preset(method.name, model), dict(segmenter.changes), sizes)


def _cut(method: type[Method], segmenter: Segmenter, params: Any, text: Text) -> Cut:
    spans = method.segments(params, text, text.surprisal)
    assert spans is not None, f"{method.name} says how it cuts"
    shown = spans if segmenter.cut is None else segmenter.cut(params, spans)
    return Cut(segmenter.name, tuple(shown), settings(params, segmenter.shown))


def is_own(reader: TraceReader, cut: Cut) -> bool:
    """Whether a cut is the one that the run's own spans come from."""
    segmenter = own_segmenter(reader)
    return segmenter is not None and segmenter.name == cut.name


def own_segmenter(reader: TraceReader) -> Segmenter | None:
    """The segmenter that cut the run; None: its method names none, or is not installed here."""
    method = installed(str(reader.meta.method))
    config = reader.meta.config
    return next((s for s in method.segmenters if s.serves(config)), None) if method is not None else None


def settings(params: Any, names: Sequence[str]) -> str:
    """'alpha 1, l_min 8': parameters in words."""
    values = {name: getattr(params, name) for name in names}
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )


@dataclass(frozen=True)
class Threshold:
    """The rule behind the what-if slider: cut where surprisal exceeds its mean by a multiple of its deviation."""

    method: type[Method]
    segmenter: Segmenter
    params: Any
    preset: str
    """as a Cut's"""

    @classmethod
    def choose(cls, reader: TraceReader, text: Text) -> Threshold | None:
        """By the run's own parameters where it was cut so, else by those that a run of the first method that cuts so
        would have. None: no method here does."""
        own_value, own_settings = own_segmenter(reader), own_parameters(reader)
        if own_value is not None and own_value.alpha and own_settings is not None:
            return cls(methods.get(str(reader.meta.method)), own_value, own_settings, "")
        for method in methods.registry().values():
            for segmenter in method.segmenters:
                if segmenter.alpha:
                    usual = _usual(reader, method, segmenter, text)
                    return cls(method, segmenter, usual.params, usual.preset or "defaults")
        return None

    @property
    def alpha(self) -> float:
        """How many deviations above the mean."""
        return float(getattr(self.params, self.segmenter.alpha))

    def cut(self, text: Text, alpha: float) -> Cut:
        """The text cut with another alpha, all else as it is."""
        params = replace(self.params, **{self.segmenter.alpha: alpha})
        cut = _cut(self.method, self.segmenter, params, text)
        return replace(cut, name=f"alpha {alpha:g}", preset=self.preset)

    def most_anchors(self, text: Text) -> int | None:
        """Most boundary tokens that the budget allows; None: it sets no such limit."""
        limit = self.segmenter.most_anchors
        return None if limit is None else limit(self.params, text)


def crossed(edges: set[int], needle: Sequence[Sequence[int]]) -> list[int]:
    """Boundaries inside a needle [start, end): a token before each belongs to it, and the token after."""
    return sorted(edge for edge in edges for start, end in needle if start < edge < end)


def crossing_text(edges: Sequence[int], most: int = 4) -> str:
    """'811|812, 815|816': boundaries by the tokens on both sides; of more than `most`, how many there are."""
    more = f" and {len(edges) - most} more" if len(edges) > most else ""
    return ", ".join(f"{edge - 1}|{edge}" for edge in edges[:most]) + more
