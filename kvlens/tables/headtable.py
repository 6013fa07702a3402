"""The columns of the table `heads`: statistics over steps, a row per layer and query head."""

from __future__ import annotations

from kvlens.store.headqueries import head_table_columns
from kvlens.store.schema import UNITS
from kvlens.tables.column import BYTES, ID, NATS, SHARE, Column

_HEAD_MEANINGS = {
    "mass_sink": (SHARE, "attention mass on sink tokens"),
    "mass_anchor": (SHARE, "attention mass on anchor tokens"),
    "mass_window": (SHARE, "attention mass on the window of newest tokens"),
    "mass_resident": (SHARE, "attention mass on exact tokens of resident spans"),
    "mass_coarse": (SHARE, "attention mass on summaries of spans"),
    "mass_reconstructed": (SHARE, "attention mass on tokens rebuilt from low-rank factors"),
    "mass_mean": (SHARE, "share of the output that a mean value substitutes for entries"),
    "mass_quantised": (SHARE, "attention mass on tokens stored in few bits"),
    "mass_rewritten": (SHARE, "attention mass on tokens whose keys or values the cache merged or rounded"),
    "entropy": (NATS, "entropy of the attention weights"),
    "qcos": ("cosine", "similarity of this step's query and the previous step's, after RoPE"),
    "coverage": (SHARE, "own-query mass on tokens attended exactly"),
    "selection_recall": (SHARE, "of the tokens with most own-query mass, the share attended in any form but a summary"),
    "regret": (SHARE, "sum over spans of own-query mass minus the method's, where positive"),
    "unread": (SHARE, "own-query mass on tokens attended in no form"),
    "reference_regret": (SHARE, "sum over spans of full KV's own mass minus the method's, where positive"),
    "reference_unread": (SHARE, "full KV's own mass on tokens attended in no form"),
    "zoom_asked": ("spans", "spans for which the query head asked for tokens in place of the summary"),
    "n_zoomed": ("spans", "spans read token by token, of those asked for"),
    "zoom_refused": ("spans", "spans without room on the device, of those asked for"),
    "zoom_rate": (SHARE, "zoomed spans as a share of the spans that could be zoomed"),
}
_AGGREGATES = {
    "mean": "mean over steps",
    "min": "smallest over steps",
    "max": "largest over steps",
    "total": "sum over steps",
}
_KV_MEANINGS = {
    "h2d_bytes": (BYTES, "moved to the device for the KV head"),
    "d2h_bytes": (BYTES, "moved to host memory for the KV head"),
    "blocking_bytes": (BYTES, "moved to the device while the step waited"),
    "resident_bytes": (BYTES, "on the device for the KV head"),
    "recalled_tokens": ("tokens", "moved to the device for the KV head"),
    "reused_tokens": ("tokens", "selected and already on the device"),
    "similarity": ("cosine", "similarity of successive queries, where the method decides by it"),
}


def head_columns() -> dict[str, Column]:
    """The columns of `TraceReader.head_table`, in its order."""
    columns = {
        "run_uid": Column("", "the run"),
        "method": Column("", "its method"),
        "model": Column("", "its model"),
        "layer": Column(ID, "layer, counted from 0"),
        "q_head": Column(ID, "query head within the layer"),
        "kv_head": Column(ID, "KV head that the query head reads"),
        "n_steps": Column("steps", "decode steps that the row covers"),
    }
    stored = {UNITS.get(name, name): name for name in _HEAD_MEANINGS}
    for name in head_table_columns():
        metric, _, aggregate = name.rpartition("_")
        if name == "n_corrected":
            meaning = "steps at which the method corrected its selection for this head"
            columns[name] = Column("steps", meaning, "n_decided")
            continue
        if name == "n_decided":
            columns[name] = Column("steps", "steps at which the method decided whether to correct; NaN: it never does")
            continue
        if metric.startswith("kv_head_"):
            unit, meaning = _KV_MEANINGS[metric.removeprefix("kv_head_")]
        else:
            unit, meaning = _HEAD_MEANINGS[stored[metric]]
        denominator = "" if aggregate in ("min", "max", "total") else "steps that recorded it"
        columns[name] = Column(unit, f"{meaning}; {_AGGREGATES[aggregate]}", denominator)
    return columns
