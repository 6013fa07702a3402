"""A replay as one HTML file: player, trace and verdict. The file sends no request and needs no kvlens to open."""

from __future__ import annotations

import base64
import hashlib
import html
import struct
import zlib
from dataclasses import replace
from string import Template

from kvlens import __version__
from kvlens.lens.verdict import Verdict, verdict
from kvlens.player.heading import facts, method_title, verdict_sentences
from kvlens.player.heads import head_messages
from kvlens.player.opening import Place, opening
from kvlens.player.payload import FILE_CUBE_BYTES, loaded_metrics, ordered_metrics, payload_id, run_payload
from kvlens.player.script import WEB, joined
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader
from kvlens.text.plaintext import visible
from kvlens.text.units import si_bytes

MOST_TRACE = 24_000_000
"""bytes of the compressed trace in one file, at most"""


class ReplayTooLarge(TraceError):
    """A trace whose replay does not fit into one file."""

    code = "replay_too_large"

    def __init__(self, uid: str, size: int, most: int) -> None:
        """`size`: bytes of the compressed trace without its heads' spans. `most`: bytes that a file holds."""
        super().__init__(
            f"The replay of run {uid} needs {si_bytes(size)}, and one file holds at most {si_bytes(most)}. Open the "
            "run in "
            f"the app, or write its report with `kvlens report {uid}`."
        )
        self.uid, self.size, self.most = uid, size, most


def player_html(
    reader: TraceReader, *, step: int | None = None, title: str | None = None, most: int = MOST_TRACE
) -> str:
    """Return the replay of a run as one self-contained HTML document.

    `step`: the step to open at; None: the step of loss. `title`: the document's heading; None: method and outcome.
    `most`: bytes of the compressed trace. If the spans of all query heads exceed it, the document holds those of fewer
    heads and reports how many. Raises ReplayTooLarge if it can hold none, TraceError for a run without decode steps or
    a step outside the run."""
    if not reader.n_steps:
        raise TraceError(f"Run {reader.uid} holds no decode step, so there is nothing to replay.")
    if step is not None and not 0 <= step < reader.n_steps:
        raise TraceError(f"Run {reader.uid} has decode steps 0 to {reader.n_steps - 1}; step {step} is not among them.")
    found = verdict(reader)
    names = ordered_metrics(reader)
    place = opening(reader, names, found)
    place = place if step is None else replace(place, step=step)
    trace, heads = _trace(reader, names, place, found, most)
    return _document(reader, found, title or _title(reader, found), trace, heads)


def _title(reader: TraceReader, found: Verdict | None) -> str:
    outcome = "" if found is None else f", loss at step {found.step}"
    return f"{method_title(reader)}{outcome}"


def _trace(reader: TraceReader, names: list[str], place: Place, found: Verdict | None, most: int) -> tuple[bytes, int]:
    """Return the compressed messages and the number of query heads whose spans they hold.

    Messages, each after its length (4 bytes, little-endian): the run's payload, then one per query head."""
    loaded = loaded_metrics(reader, names, place.metric, FILE_CUBE_BYTES)
    identity = payload_id(reader.uid, 0, loaded)
    stream = zlib.compressobj(6)
    trace = _append(stream, run_payload(reader, identity, loaded, loaded, found))
    if len(trace) > most:
        raise ReplayTooLarge(reader.uid, len(trace), most)
    heads = 0
    for _, _, message in head_messages(reader, identity, place):
        extended = stream.copy()
        part = _append(extended, message)
        if heads and len(trace) + len(part) > most:
            break
        stream, trace, heads = extended, trace + part, heads + 1
    return trace + stream.flush(), heads


def _append(stream: zlib._Compress, message: bytes) -> bytes:
    """Return the bytes that a message adds to a compressed stream."""
    return stream.compress(struct.pack("<I", len(message)) + message) + stream.flush(zlib.Z_SYNC_FLUSH)


def _document(reader: TraceReader, found: Verdict | None, title: str, trace: bytes, heads: int) -> str:
    """Return the page. Its policy allows this script and this style by their hashes, and no request."""
    script, style = joined(WEB / "page.js"), "\n".join(_text(name) for name in ("player.css", "page.css"))
    all_heads = reader.n_layers * reader.q_heads
    missing = "" if heads == all_heads else f"This file holds the spans of {heads:,} of {all_heads:,} query heads."
    return Template(_text("page.html")).substitute(
        policy=f"default-src 'none'; script-src '{_hashed(script)}'; style-src '{_hashed(style)}'; "
        "base-uri 'none'; form-action 'none'",
        title=_safe(title),
        style=style,
        facts="".join(f"<div><dt>{_safe(name)}</dt><dd>{_safe(value)}</dd></div>" for name, value in facts(reader)),
        verdict="".join(f"<p>{_safe(sentence)}</p>" for sentence in verdict_sentences(reader, found)),
        missing=_safe(missing),
        player=_text("player.html"),
        version=_safe(__version__),
        trace=base64.b64encode(trace).decode("ascii"),
        script=script,
    )


def _text(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def _safe(text: str) -> str:
    return html.escape(visible(text), quote=True)


def _hashed(source: str) -> str:
    """Return the hash by which a content security policy allows an inline source."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode("ascii")
