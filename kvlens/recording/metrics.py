"""What each recorded quantity is called, its unit, its natural range and the colour scale that suits it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvlens.text.units import si_bytes


@dataclass(frozen=True)
class Metric:
    """One recorded quantity per (step, layer, head)."""

    name: str
    title: str
    unit: str
    """'share', 'nats', 'cosine', 'spans', 'bytes', 'tokens', 'entries', '0 or 1'"""
    level: str
    """'q': one value per query head; 'kv': one value per KV head, drawn for every query head of its group"""
    lo: float | None
    """natural lower end of the colour range; None: the smallest recorded value"""
    hi: float | None
    """natural upper end; None: the largest recorded value"""
    doc: str
    diverging: bool = False

    @property
    def label(self) -> str:
        """Title with its unit, for axes and colour bars."""
        return f"{self.title} ({self.unit})"

    @property
    def mean_unit(self) -> str:
        """Unit of a mean over steps or heads: of yes and no, the share of yes."""
        return "share" if self.unit == "0 or 1" else self.unit

    @property
    def colorscale(self) -> str:
        """Cividis for quantities that grow from zero, RdBu around zero for signed ones."""
        return "RdBu" if self.diverging else "Cividis"

    def bounds(self, values: np.ndarray) -> tuple[float, float]:
        """Colour range for `values`: the natural ends where there are some, else the recorded ones; never empty."""
        finite = values[np.isfinite(values)]
        lo = self.lo if self.lo is not None else float(finite.min(initial=0.0))
        hi = self.hi if self.hi is not None else float(finite.max(initial=lo))
        return lo, (hi if hi > lo else lo + 1.0)

    def value_range(self, values: np.ndarray) -> tuple[float, float]:
        """Smallest and largest recorded value (their larger size, both ways, for a signed metric); never empty."""
        finite = values[np.isfinite(values)]
        lo, hi = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        if self.diverging:
            hi = max(abs(lo), abs(hi))
            lo = -hi
        return lo, (hi if hi > lo else lo + 1.0)


def _share(name: str, title: str, doc: str) -> Metric:
    return Metric(name, title, "share", "q", 0.0, 1.0, doc)


def _count(name: str, title: str, unit: str, doc: str) -> Metric:
    return Metric(name, title, unit, "kv", 0.0, None, doc)


REGRETS = ("reference_regret", "regret")
"""metrics of what was missed: by full KV's own mass, and, where that was not recorded, by the own-query mass"""
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _share("mass_sink", "Mass on sinks", "attention mass on the first tokens, kept on the device as sinks"),
        _share("mass_anchor", "Mass on anchors", "attention mass on anchor tokens kept at full resolution"),
        _share("mass_window", "Mass on window", "attention mass on the window of latest tokens"),
        _share("mass_resident", "Mass on resident spans", "attention mass on exact tokens of spans that are resident"),
        _share("mass_coarse", "Mass on summaries", "attention mass on the summary entries of spans"),
        _share(
            "mass_reconstructed", "Mass on rebuilt tokens", "attention mass on tokens rebuilt from low-rank factors"
        ),
        _share(
            "mass_mean",
            "Mass on a mean value",
            "share of the output that a mean value stands in for, since its tokens were not attended",
        ),
        _share("mass_quantised", "Mass on quantised tokens", "attention mass on tokens that lie in a few bits each"),
        _share(
            "mass_rewritten",
            "Mass on rewritten tokens",
            "attention mass on tokens whose keys or values the cache merged or rounded",
        ),
        Metric(
            "entropy", "Attention entropy", "nats", "q", 0.0, None, "entropy of the attention over attended entries"
        ),
        Metric(
            "qcos",
            "Query cosine",
            "cosine",
            "q",
            -1.0,
            1.0,
            "cosine of this step's query and the one before, both after RoPE",
            True,
        ),
        _share(
            "coverage",
            "Coverage",
            "share of the own-query mass (full attention by this run's own query) on tokens the query head attended "
            "exactly; what it read through a summary, or rebuilt, does not count",
        ),
        _share(
            "selection_recall",
            "Selection recall",
            "of the k tokens with most own-query mass, the share this query head attended, k being how many "
            "tokens it attended; the share of the context that k is would be chance",
        ),
        Metric(
            "reference_regret",
            "Regret",
            "share",
            "q",
            0.0,
            None,
            "full KV's own mass that the method did not give the same span, added up over all spans; the mass of a "
            "span's summary counts as given",
        ),
        Metric(
            "regret",
            "Own-query regret",
            "share",
            "q",
            0.0,
            None,
            "own-query mass (full attention by this run's own query) that the method did not give the same span, added "
            "up over all spans; the mass of a span's summary counts as given",
        ),
        _share(
            "reference_unread",
            "Unread",
            "share of full KV's own mass on tokens the query head attended in no form: not exactly, not rebuilt, not "
            "through a summary",
        ),
        _share(
            "unread",
            "Own-query unread",
            "share of the own-query mass on tokens the query head attended in no form: not exactly, not rebuilt, "
            "not through a summary; 1 - coverage - unread was read rebuilt or as a summary",
        ),
        Metric(
            "zoom_asked",
            "Zooms asked",
            "spans",
            "q",
            0.0,
            None,
            "spans for which this query head asked for tokens in place of the summary",
        ),
        Metric(
            "n_zoomed",
            "Zooms granted",
            "spans",
            "q",
            0.0,
            None,
            "spans this query head read token by token, of those it asked for",
        ),
        Metric(
            "zoom_refused",
            "Zooms refused",
            "spans",
            "q",
            0.0,
            None,
            "spans this query head asked for, and the device had no room for",
        ),
        Metric(
            "zoom_rate",
            "Zoom rate",
            "share",
            "q",
            0.0,
            None,
            "zoomed spans as a share of the spans it could have zoomed into",
        ),
        Metric("corrected", "Corrected", "0 or 1", "q", 0.0, 1.0, "1 where the method corrected a reused selection"),
        _count("h2d_bytes", "Bytes to device", "bytes", "bytes moved to the device for this KV head"),
        _count("d2h_bytes", "Bytes to host memory", "bytes", "bytes moved to host memory for this KV head"),
        _count(
            "blocking_bytes",
            "Blocking bytes",
            "bytes",
            "the part of the bytes to device without which the step's attention could not begin",
        ),
        _count(
            "ideal_bytes",
            "Ideal bytes to device",
            "bytes",
            "what would have moved had every wanted token that was on the device been reused",
        ),
        _count("resident_bytes", "Resident bytes", "bytes", "KV bytes this KV head holds on the device"),
        _count(
            "read_bytes",
            "Bytes read",
            "bytes",
            "keys and values of the entries this KV head attends, and what was read of the method's index for it",
        ),
        _count("attended_tokens", "Attended tokens", "tokens", "tokens, exact or rebuilt, in this KV head's softmax"),
        _count("attended_coarse", "Attended summaries", "entries", "summary entries in this KV head's softmax"),
        _count("n_recalled", "Recalled spans", "spans", "spans brought from host memory to the device"),
        _count("n_reused", "Reused spans", "spans", "needed spans that were on the device already"),
        _count("recalled_tokens", "Recalled tokens", "tokens", "tokens brought from host memory to the device"),
        _count("reused_tokens", "Reused tokens", "tokens", "needed tokens that were on the device already"),
        Metric(
            "similarity",
            "Query similarity",
            "cosine",
            "kv",
            -1.0,
            1.0,
            (
                "cosine of this step's queries and the last step's, mean over the KV head's group, by which the "
                "method decides"
            ),
            True,
        ),
    )
}


def metric_of(name: str) -> Metric:
    """The description of `name`; a column unknown to this version is shown under its own name, unit 'value'."""
    return METRICS.get(name) or Metric(name, name, "value", "q", None, None, "a column this version does not describe")


def head_label(layer: int, q_head: int, group: int) -> str:
    """'L3 Q5 (KV1)': a query head always beside its KV head. `group`: query heads per KV head."""
    return f"L{layer} Q{q_head} (KV{q_head // group})"


def value_text(value: float, metric: Metric) -> str:
    """A value as it is printed beside figures; NaN is 'not recorded'."""
    if not np.isfinite(value):
        return "not recorded"
    if metric.unit == "bytes":
        return si_bytes(value)
    return f"{value:.4f}" if metric.unit in ("share", "cosine", "0 or 1") else f"{value:.4g} {metric.unit}"
