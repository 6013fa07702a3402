"""What the player is sent: once per run the tokens, spans, tracks and metric cubes; per selected head its masses and
states."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from kvlens.lens.condition import condition
from kvlens.lens.verdict import Verdict
from kvlens.player import lens
from kvlens.player.codec import pack, quantise
from kvlens.player.opening import Place
from kvlens.player.sparse import places, sparse
from kvlens.recording.metrics import METRICS, Metric, metric_of
from kvlens.rows import SPAN_STATES
from kvlens.store.reader import TraceReader
from kvlens.text.passages import continued
from kvlens.text.plaintext import visible

#: Metric cubes take two bytes per value; a page is sent those beyond this sum when its user chooses them.
CUBE_BYTES = 4_000_000
#: A file cannot ask for more, so it holds more.
FILE_CUBE_BYTES = 24_000_000


def per_step_metrics(reader: TraceReader) -> list[str]:
    """Names of the metrics that have a value per step and head, query-head metrics first."""
    if reader.meta.trace_level == "summary":
        return []
    return [*reader.metrics(), *reader.kv_metrics()]


def ordered_metrics(reader: TraceReader) -> list[str]:
    """Return `per_step_metrics` in the order of METRICS; metrics that METRICS lacks come last."""
    places = {name: place for place, name in enumerate(METRICS)}
    return sorted(per_step_metrics(reader), key=lambda name: places.get(name, len(METRICS)))


def cube(reader: TraceReader, name: str) -> np.ndarray:
    """float32 [steps, L, Hq]; a metric of KV heads is repeated for every query head of its group."""
    metric = metric_of(name)
    if metric.level == "q":
        return reader.head_cube(name)
    return np.repeat(reader.kv_cube(name), reader.q_heads // reader.kv_heads, axis=2)


def loaded_metrics(
    reader: TraceReader, names: list[str], wanted: str | None, most_bytes: int = CUBE_BYTES
) -> list[str]:
    """The metrics whose cubes fit into one payload of `most_bytes`, the wanted one always among them."""
    room = max(1, most_bytes // max(1, 2 * reader.n_steps * reader.n_layers * reader.q_heads))
    first = names[:room]
    return first if wanted is None or wanted in first else [wanted, *first[:-1]]


def payload_id(uid: str, stamp: int, loaded: Iterable[str]) -> str:
    """Names a payload by what is in it."""
    return f"{uid}-{hashlib.sha256(repr((stamp, *loaded)).encode()).hexdigest()[:12]}"


def run_payload(
    reader: TraceReader, identity: str, names: list[str], loaded: list[str], found: Verdict | None = None
) -> bytes:
    """Everything about a run that does not depend on the selection. `names`: all metrics, `loaded`: those sent now,
    `found`: the verdict on the run."""
    tokens, spans = reader.tokens(), reader.spans()
    generated = tokens["step"].notna().to_numpy()
    logprob = tokens["logprob"].to_numpy(np.float64)[generated]
    surprisal = np.where(generated, -tokens["logprob"].to_numpy(np.float64), tokens["surprisal"].to_numpy(np.float64))
    arrays: dict[str, np.ndarray] = {
        "surprisal": surprisal.astype(np.float32),
        "logprob": logprob,
        "pos_of_step": tokens["pos"].to_numpy(np.int32)[generated],
        "char_start": tokens["char_start"].fillna(-1).to_numpy(np.int32),
        "char_end": tokens["char_end"].fillna(-1).to_numpy(np.int32),
    }
    described = [_describe(reader, name, name in loaded, arrays) for name in names]
    arrays["corrections"] = lens.corrections(reader).ravel()
    masses = reader.meta.trace_level == "spans"
    if masses:
        # mean over all query heads; a lower bound, since heads list their strongest spans only
        means = reader.mean_span_mass_by_step().sort_values(["step", "span"])
        arrays |= sparse("mean", means, reader.n_steps, places(spans))
        arrays |= lens.worst(reader, places(spans))
    header: dict[str, Any] = {
        "payload": identity,
        "uid": reader.uid,
        "steps": reader.n_steps,
        "layers": reader.n_layers,
        "q_heads": reader.q_heads,
        "kv_heads": reader.kv_heads,
        "prompt": int((~generated).sum()),
        "asked": reader.meta.asked_steps,
        "texts": [visible(text) for text in tokens["text"]],
        "continued": continued(tokens),
        "spans": _span_list(spans),
        "span_masses": masses,
        "needle": needle_tokens(tokens, reader.meta.needle),
        "metrics": described,
        "tracks": _tracks(reader, names, arrays),
        "jumps": lens.jumps(reader, found),
        "diverged": lens.diverged(reader),
        "oracle": bool(reader.meta.sampled),
        "reference": reader.has_reference_masses(),
        "sampling": lens.sampling(reader),
        "sampled": lens.sampled_steps(reader),
        "condition": condition([reader]),
    }
    return pack(header, arrays)


def slice_payload(reader: TraceReader, identity: str, place: Place, revision: int) -> bytes:
    """What the player needs for the selected head: its span masses and the states of its KV head's spans, over all
    steps."""
    spans = reader.spans()
    return pack_slice(
        {"payload": identity, "rev": revision},
        place,
        state_changes(spans, reader.state_changes(place.layer, place.head // (reader.q_heads // reader.kv_heads))),
        sparse("head", reader.span_mass(place.layer, place.head), reader.n_steps, places(spans)),
        lens.wanted_arrays(lens.read_wanted(reader, place.layer, place.head), reader.n_steps, places(spans)),
    )


def pack_slice(
    header: dict[str, Any],
    place: Place,
    states: dict[str, np.ndarray],
    masses: dict[str, np.ndarray],
    wanted: dict[str, np.ndarray],
) -> bytes:
    """Return the message of one query head from its arrays (`state_changes`, `sparse`, `lens.wanted_arrays`).

    `header`: the payload's name and the revision."""
    return pack(header | asdict(place), states | masses | wanted)


def needle_tokens(tokens: pd.DataFrame, ranges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Token ranges [start, end) that overlap the character ranges [start, end) of the needle."""
    starts, ends = tokens["char_start"].to_numpy(np.float64), tokens["char_end"].to_numpy(np.float64)
    found = []
    for start, end in ranges:
        inside = np.flatnonzero((starts < end) & (ends > start) & (ends > starts))
        if inside.size:
            found.append([int(inside[0]), int(inside[-1]) + 1])
    return found


def state_changes(spans: pd.DataFrame, changes: pd.DataFrame) -> dict[str, np.ndarray]:
    """Where the spans of one KV head lay while each step attended, as changes in the order of steps: step, index of the
    span, index into SPAN_STATES. changes: the head's, of `TraceReader.state_changes`."""
    index = {int(span): place for place, span in enumerate(spans["span"])}
    return {
        "change_step": changes["step"].to_numpy(np.int32),
        "change_span": changes["span"].map(index).to_numpy(np.int32),
        "change_state": changes["state"].map(SPAN_STATES.index).to_numpy(np.uint8),
    }


def _describe(reader: TraceReader, name: str, load: bool, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """A metric for the player; its cube goes into `arrays` as codes over the recorded range."""
    metric: Metric = metric_of(name)
    entry: dict[str, Any] = {
        "name": name,
        "title": metric.title,
        "unit": metric.unit,
        "level": metric.level,
        "doc": metric.doc,
        "diverging": metric.diverging,
        "loaded": load,
        "zero": metric.lo == 0.0,
    }
    if load:
        values = cube(reader, name)
        lo, hi = metric.value_range(values)
        entry |= {"lo": lo, "hi": hi, "seen": [lo, hi], "natural": metric.bounds(values)}
        arrays[f"cube:{name}"] = quantise(values, entry["lo"], entry["hi"])
    return entry


def _span_list(spans: pd.DataFrame) -> list[dict[str, Any]]:
    columns = zip(
        spans["span"],
        spans["kind"],
        spans["tok_start"],
        spans["tok_end"],
        spans["born_step"],
        spans["died_step"],
        strict=True,
    )
    return [
        {
            "id": int(s),
            "kind": str(kind),
            "start": int(a),
            "end": int(b),
            "born": int(born),
            "died": None if pd.isna(died) else int(died),
        }
        for s, kind, a, b, born, died in columns
    ]


def _tracks(reader: TraceReader, names: list[str], arrays: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Quantities per step, for the curves beside the head map; values go into `arrays`."""
    steps = reader.steps()
    arrays["track:logprob"] = arrays["logprob"]
    tracks = lens.loss_track(reader, arrays)
    tracks.append({"name": "logprob", "title": "log p of the step's token", "unit": "nats"})
    if "n_zoomed" in names:
        zoomed = reader.head_cube("n_zoomed").astype(np.float64).reshape(reader.n_steps, -1)
        arrays["track:zooms"] = np.where(np.isfinite(zoomed).any(axis=1), np.nansum(zoomed, axis=1), np.nan)
        tracks.append(
            {
                "name": "zooms",
                "title": "zoomed spans, summed over query heads",
                "unit": "spans",
                "dots": True,
                "zero": True,
            }
        )
    arrays["track:h2d"] = steps["h2d_bytes"].to_numpy(np.float64)
    tracks.append({"name": "h2d", "title": "bytes to device", "unit": "bytes", "dots": True, "zero": True})
    arrays["track:peak"] = steps["peak_bytes"].to_numpy(np.float64)
    arrays["track:resident"] = steps["resident_bytes"].to_numpy(np.float64)
    memory: dict[str, Any] = {
        "name": "peak",
        "title": "KV bytes on device: peak in step (blue), after step (orange)",
        "unit": "bytes",
        "zero": True,
    }
    memory["second"] = {"name": "resident"}
    budget = reader.meta.budget_bytes
    if budget is not None:
        memory |= {"title": f"{memory['title']}, budget (dashed)", "line": {"value": float(budget)}}
    return [*tracks, memory]
