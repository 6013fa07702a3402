"""Exports, read back by other readers than the one that wrote them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from support import raises_code

from kvlens.meta import RunMeta
from kvlens.records import PrefillRecord
from kvlens.rows import PromptToken
from kvlens.store import queries
from kvlens.store.export import EXPORTS, FORMATS, export
from kvlens.store.reader import TraceError, TraceReader
from kvlens.store.runinfo import config_hash
from kvlens.store.writer import TraceWriter
from tests.synthetic import write_synthetic


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceReader]:
    folder = tmp_path_factory.mktemp("runs")
    with TraceReader.open(folder, write_synthetic(folder, 2, 4, 2, steps=12, spans=12, top_k=4)) as opened:
        yield opened


def lengths(reader: TraceReader) -> dict[str, int]:
    masses = sum(len(reader.span_mass(layer, head)) for layer in range(2) for head in range(4))
    return {
        "heads": 8,
        "head-steps": 96,
        "spans": len(reader.spans()),
        "kv-steps": 48,
        "steps": 12,
        "decisions": len(reader.decisions()),
        "phases": 12,
        "meta": len(reader.batches(queries.ALL_META).read_all()),
        "span-mass": masses,
        "transfers": len(reader.transfers()),
        "events": len(reader.events()),
        "tokens": len(reader.tokens()),
        "journal": sum(map(len, reader.journal()["values"])),
        "cuts": 12,
        "loss": len(reader.loss()),
        "oracle": sum(len(reader.oracle_step(step)) for step in range(12)),
        "lost-tokens": sum(len(reader.lost_tokens(step)) for step in range(12)),
        "effects": len(reader.effects(9)),
        "span-keys": sum(
            keys[1].size for layer in range(2) for head in range(2) if (keys := reader.span_keys(layer, head))
        ),
        "scores": sum(
            len(reader.scores(step, layer, head)) for step in range(12) for layer in range(2) for head in range(2)
        ),
    }


@pytest.mark.parametrize("what", EXPORTS)
def test_the_three_formats_hold_the_same_table(reader: TraceReader, what: str, tmp_path: Path) -> None:
    for fmt in FORMATS:
        export(reader, what, fmt, tmp_path / f"out.{fmt}")
    text = pd.read_csv(tmp_path / "out.csv", keep_default_na=False, na_values=[""])
    table = pd.read_parquet(tmp_path / "out.parquet")
    objects = json.loads((tmp_path / "out.json").read_text())
    assert len(text) == len(table) == len(objects) == lengths(reader)[what]
    assert list(text.columns) == list(table.columns) == list(objects[0])
    numbers = table.select_dtypes("number").columns
    for name in numbers:
        pd.testing.assert_series_equal(
            text[name].astype(float), table[name].astype(float), check_names=False, rtol=1e-6
        )
        from_json = pd.Series([row[name] for row in objects], dtype=float)
        pd.testing.assert_series_equal(from_json, table[name].astype(float), check_names=False, rtol=1e-6)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_names_carry_units_and_null_stays_empty(reader: TraceReader) -> None:
    out = io.BytesIO()
    export(reader, "head-steps", "csv", out)
    rows = list(csv.DictReader(io.StringIO(out.getvalue().decode())))
    assert {"entropy_nats", "n_zoomed_spans"} <= set(rows[0])
    assert {row["corrected"] for row in rows} == {""}
    assert {"lead_logits", "effect_logits"} <= set(pd.read_csv(_bytes(reader, "effects", "csv")).columns)
    assert {"surprisal_nats", "logprob_nats"} <= set(pd.read_csv(_bytes(reader, "tokens", "csv")).columns)


def _bytes(reader: TraceReader, what: str, fmt: str) -> io.BytesIO:
    out = io.BytesIO()
    export(reader, what, fmt, out)
    return io.BytesIO(out.getvalue())


def test_parquet_says_which_run_it_came_from(reader: TraceReader) -> None:
    metadata = pq.read_schema(_bytes(reader, "heads", "parquet")).metadata
    assert metadata[b"kvlens.run_uid"].decode() == reader.uid
    assert metadata[b"kvlens.method"] == b"sekv"
    assert metadata[b"kvlens.config_sha256"].decode() == config_hash(reader.meta.config)


def test_formulas_are_defused_in_csv_text_only(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    writer.begin(RunMeta(layers=1, q_heads=1, kv_heads=1))
    texts = ["=1+1", "+2", "-3", "@x", "\tt", "plain", '"quoted", and, commas\n']
    writer.prefill(
        PrefillRecord(
            tokens=[PromptToken(i, -i, text, None, None, None) for i, text in enumerate(texts)],
            spans=[],
            span_heads=[],
            transfers=[],
            events=[],
            prefill_us=1,
            prefill_peak_bytes=1,
            cold_bytes=1,
            resident_bytes=1,
        )
    )
    writer.finish("completed", None, [], {})
    with TraceReader.open(tmp_path, writer.uid) as reader:
        rows = list(csv.DictReader(io.StringIO(_bytes(reader, "tokens", "csv").getvalue().decode(), newline="")))
        assert [row["text"] for row in rows] == ["'=1+1", "'+2", "'-3", "'@x", "'\tt", *texts[5:]]
        assert [row["token_id"] for row in rows] == [str(-i) for i in range(len(texts))]
        assert [row["text"] for row in json.loads(_bytes(reader, "tokens", "json").getvalue())] == texts


def test_an_unknown_table_format_or_place_is_one_sentence(reader: TraceReader, tmp_path: Path) -> None:
    with raises_code("unknown_table", table="weights"):
        export(reader, "weights", "csv", tmp_path / "x")
    with raises_code("unknown_format", format="xlsx"):
        export(reader, "heads", "xlsx", tmp_path / "x")
    with pytest.raises(TraceError, match="cannot be written"):
        export(reader, "heads", "csv", tmp_path / "absent" / "x.csv")
