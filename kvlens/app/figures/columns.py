"""Columns of tables in words: what a page writes over a column whose name in files is a code, and what it says when the
pointer rests there. Names in files are contracts (docs/trace-schema.md) and stay."""

from __future__ import annotations

from kvlens.recording.metrics import METRICS

_OVER = {"mean": "mean over the steps", "min": "smallest", "max": "largest", "total": "over all steps"}
_KV = "kv_head_"
_EXPORTED = {"mass_mean": "mass_substitute"}
"""metric -> its name in tables, where that is another"""
_OWN = {
    "layer": ("layer", ""),
    "q_head": ("query head", ""),
    "kv_head": ("KV head", "whose keys and values the query head reads"),
    "n_steps": ("steps", "decode steps that were recorded"),
    "n_decided": ("decided (steps)", "steps at which the method decided whether to correct"),
    "n_corrected": ("corrected (steps)", "steps at which the method corrected a reused selection"),
}


def column_words(name: str) -> tuple[str, str]:
    """(heading, explanation) of a column of statistics per query head; of one that is not known its name without
    underscores."""
    if name in _OWN:
        return _OWN[name]
    base, _, over = name.removeprefix(_KV).rpartition("_")
    for metric in METRICS.values():
        units = (metric.name, f"{metric.name}_{metric.unit}", _EXPORTED.get(metric.name))
        if base in units and over in _OVER:
            owner = "; of the KV head" if name.startswith(_KV) else ""
            title = metric.title[0].lower() + metric.title[1:]
            unit = "" if metric.unit in title.split() else f" ({metric.unit})"
            return f"{title}, {over}{unit}", f"{metric.doc}; {_OVER[over]}{owner}"
    return name.replace("_", " "), ""
