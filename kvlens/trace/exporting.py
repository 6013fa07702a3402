"""A stored run in the open format: the tables that both have, with plain masses, and trace.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvlens import __version__
from kvlens.files import make_folder
from kvlens.store.errors import TraceError, sentence
from kvlens.store.reader import TraceReader
from kvlens.store.schema import ORACLE_CODES
from kvlens.store.versions import source
from kvlens.text.plaintext import strict_json
from kvlens.trace.columns import FORMAT, VERSION
from kvlens.trace.head import NAME, Head
from kvlens.trace.importing import OWN_ENGINE, same_keys
from kvlens.trace.tables import TABLES

_CODED = {
    "head_span": ("mass",),
    "oracle": (
        "full_mass", "mass", "unread", "lost_mass", "reference_mass", "reference_unread", "reference_lost_mass",
    ),
}  # fmt: skip
"""table -> columns that the store has as codes"""
_CODES = {"head_span": 255, "oracle": ORACLE_CODES}
_ORDER = {"event": " ORDER BY place", "journal": "", "decision": "", "cut": "", "effect": ""}


def export_trace(reader: TraceReader, folder: Path) -> Path:
    """Write a run as a trace of the open format and return its folder. Raises TraceError where the folder holds a trace
    or cannot be written."""
    if (folder / NAME).exists():
        raise TraceError(f"{folder} holds a trace; choose another folder.")
    try:
        make_folder(folder)
        tables = {name: file for name in TABLES if (file := _write(reader, name, folder)) is not None}
        head = _head(reader) | {"tables": {name: [file] for name, file in tables.items()}}
        Head.model_validate_json(json.dumps(head))
        (folder / NAME).write_text(strict_json(head, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{folder} cannot be written ({sentence(error)}); choose another folder.") from error
    return folder


def _write(reader: TraceReader, name: str, folder: Path) -> str | None:
    """Write one table and return its file; None: the run recorded no row of it."""
    columns = ", ".join(_column(name, column) for column in TABLES[name].columns)
    batches = reader.batches(f"SELECT {columns} FROM {source(name)}{_ORDER.get(name, '')}")
    table = pa.Table.from_batches(list(batches), schema=batches.schema)
    if not table.num_rows and not TABLES[name].required:
        return None
    file = f"{name}.parquet"
    pq.write_table(table, folder / file, compression="zstd")
    return file


def _column(table: str, name: str) -> str:
    """SQL of a column as the format has it."""
    if name in _CODED.get(table, ()):
        code = _CODES[table]
        return f'list_transform("{name}", lambda x: (x::DOUBLE / {code}) ** 2) AS "{name}"'
    return f'"{name}"::VARCHAR AS "{name}"' if (table, name) == ("event", "kind") else f'"{name}"'


def _head(reader: TraceReader) -> dict[str, Any]:
    meta = reader.meta
    keys = meta.model_dump(mode="json", include=set(same_keys()))
    keys |= meta.model_dump(
        mode="json",
        include={
            "model",
            "method",
            "output_text",
            "stopped",
            "prefill_us",
            "prefill_peak_bytes",
            "prefill_cold_bytes",
            "prefill_resident_bytes",
        },
    )
    return {name: value for name, value in keys.items() if value is not None} | {
        "format": FORMAT,
        "version": VERSION,
        "engine": f"{OWN_ENGINE} {__version__}",
        "layers": reader.n_layers,
        "q_heads": reader.q_heads,
        "kv_heads": reader.kv_heads,
        "steps": reader.n_steps,
        "complete": reader.status == "completed",
        "parameters": meta.config,
        "prompt_text": reader.prompt_text(),
        "effect_steps": list(meta.effect_steps),
        "full_attention": None if meta.sampled is None else meta.sampled.model_dump(mode="json"),
    }
