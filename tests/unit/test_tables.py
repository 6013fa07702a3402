"""A table of many runs: the columns of the runs, one schema, the data dictionary and what Parquet says of columns."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from kvlens.store.export import EXPORTS
from kvlens.store.reader import TraceReader
from kvlens.tables import frames
from kvlens.tables.column import Column
from kvlens.tables.dictionary import RECORDED, RUN, dictionary
from kvlens.tables.manyruns import PARAMETER, TABLES, export_frame, export_runs, table_of_runs
from tests.synthetic import write_synthetic


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Two runs of different methods, parameters and sizes."""
    folder = tmp_path_factory.mktemp("tables")
    first = write_synthetic(folder, 2, 4, 2, 24, 6, seed=1, forced=True)
    second = write_synthetic(folder, 3, 4, 2, 20, 4, seed=2, method="freekv", config={"tau": 0.9, "page": 16})
    return folder, [first, second]


@pytest.mark.parametrize("table", [name for name in TABLES if name in RECORDED])
def test_every_column_of_a_table_of_many_runs_is_in_the_dictionary(runs: tuple[Path, list[str]], table: str) -> None:
    folder, uids = runs
    frame = table_of_runs(uids, folder, table)
    parameters = [name for name in frame.columns if name.startswith(PARAMETER)]
    assert set(frame.columns) - set(parameters) == {*RUN, *RECORDED[table]}
    assert list(dict.fromkeys(frame["uid"])) == [uid for uid in uids if uid in set(frame["uid"])]
    assert set(frame.attrs["units"]) == {*RUN, *RECORDED[table]}


def test_a_row_says_of_which_run_it_is(runs: tuple[Path, list[str]]) -> None:
    folder, uids = runs
    frame = table_of_runs(uids, folder, "decisions").drop_duplicates("uid").set_index("uid")
    assert frame.loc[uids[1], "method"] == "freekv"
    assert frame.loc[uids[1], f"{PARAMETER}tau"] == 0.9
    assert frame[f"{PARAMETER}tau"].isna().tolist() == [True, False]
    assert frame["question_known"].all()
    assert frame["prompt_sha256"].notna().all()
    assert frame["outcome_kinds"].notna().all()


def test_spans_have_the_mean_surprisal_of_their_tokens(runs: tuple[Path, list[str]]) -> None:
    folder, uids = runs
    with TraceReader.open(folder, uids[0]) as reader:
        stored, table, tokens = reader.spans(), frames.spans(reader), reader.tokens()
    nats = tokens["surprisal"].astype(float).where(tokens["step"].isna(), -tokens["logprob"].astype(float))
    assert stored["mean_surprisal"].isna().any()
    for row in table[stored["mean_surprisal"].isna().to_numpy()].itertuples():
        assert row.mean_surprisal_nats == pytest.approx(nats.iloc[row.tok_start : row.tok_end].mean(), nan_ok=True)
    assert table["mean_surprisal_nats"].notna().any()


@pytest.mark.parametrize("fmt", ["csv", "parquet", "json"])
def test_the_formats_agree_over_many_runs(runs: tuple[Path, list[str]], fmt: str) -> None:
    folder, uids = runs
    out = io.BytesIO()
    export_runs(uids, folder, "kv-steps", fmt, out)
    readers: dict[str, Any] = {"csv": pd.read_csv, "parquet": pd.read_parquet, "json": pd.read_json}
    frame = readers[fmt](io.BytesIO(out.getvalue()))
    wanted = table_of_runs(uids, folder, "kv-steps")
    assert list(frame.columns) == list(wanted.columns)
    assert frame["h2d_bytes"].tolist() == wanted["h2d_bytes"].tolist()


def test_parquet_says_unit_meaning_and_denominator_of_a_column(runs: tuple[Path, list[str]]) -> None:
    folder, uids = runs
    out = io.BytesIO()
    export_runs(uids[:1], folder, "heads", "parquet", out)
    field = pq.read_schema(io.BytesIO(out.getvalue())).field("n_corrected")
    assert field.metadata[b"unit"] == b"steps"
    assert field.metadata[b"denominator"] == b"n_decided"
    assert field.metadata[b"meaning"]


def test_frames_of_a_run_have_the_columns_of_its_exports(runs: tuple[Path, list[str]]) -> None:
    folder, uids = runs
    with TraceReader.open(folder, uids[0]) as reader:
        made = {
            "steps": frames.steps(reader),
            "spans": frames.spans(reader),
            "heads": frames.heads(reader, 0, None),
            "decisions": frames.decisions(reader, None, None, None, None),
            "events": frames.events(reader, None, None, None),
            "transfers": frames.transfers(reader, None, None, None),
            **{name: frames.rows(reader, name) for name in ("head-steps", "kv-steps", "phases", "meta")},
        }
    for table, frame in made.items():
        out = io.BytesIO()
        export_runs(uids[:1], folder, table, "csv", out)
        exported = pd.read_csv(io.BytesIO(out.getvalue()))
        assert list(exported.columns) == list(frame.columns) == list(RECORDED[table]), table
        assert len(exported) == len(frame) > 0, table


def test_a_count_of_a_head_names_its_denominator_in_a_column_that_exists() -> None:
    heads: dict[str, Column] = RECORDED["heads"]
    assert heads["n_corrected"].denominator == "n_decided" in heads
    assert "mass_mean_mean" not in heads
    assert {column.split("_mean")[0] for column in heads} >= {"mass_substitute"}


def test_the_dictionary_has_every_column_and_goes_into_a_file() -> None:
    frame, out = dictionary(), io.BytesIO()
    assert len(frame) == len(RUN) + sum(map(len, RECORDED.values()))
    assert frame["meaning"].str.len().min() > 0
    export_frame(frame, "csv", out)
    assert len(pd.read_csv(io.BytesIO(out.getvalue()))) == len(frame)


def test_unknown_tables_and_a_timeline_of_two_runs_are_refused(runs: tuple[Path, list[str]]) -> None:
    folder, uids = runs
    for table in ("weights", "chrome-trace"):
        with pytest.raises(ValueError, match=table):
            export_runs(uids, folder, table, "json", io.BytesIO())
    assert set(EXPORTS) <= set(TABLES)
