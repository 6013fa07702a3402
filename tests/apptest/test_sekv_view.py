"""SeKV's view on the Method page, over real runs of the demo model: what it shows is what the trace holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import task_prompt
from test_pages import words
from uiruns import Runs, Visit

from kvlens.app.methods import sekv_table
from kvlens.app.ui.common import sentences
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.text.units import si_bytes

ARMS: dict[str, dict[str, str]] = {
    "trained": {},
    "pre_rope": {"router": "pca", "pre_rope": "true"},
    "off": {"zoom": "off", "form": "raw"},
    "whole": {"router": "mean", "zoom_rate": "1", "whole_share": "0.5", "coarse": "false"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, demo: Any) -> tuple[Path, dict[str, str]]:
    """A folder with one run per arm, and their ids."""
    folder = tmp_path_factory.mktemp("sekv-runs")
    prompt, _ = task_prompt(demo, "needle", 512, max_new=6)
    uids = {}
    for name, overrides in ARMS.items():
        request = RunRequest(method="sekv", budget="0.5", overrides=overrides, max_new=6, ignore_eos=True)
        uids[name] = carry_out(request, prompt.source, folder, lambda *_: None, lambda: False)[0]
    return folder, uids


def test_a_run_shows_zooms_spans_scores_and_transfers(visit: Visit, made: tuple[Path, dict[str, str]]) -> None:
    folder, uids = made
    app = visit(folder, "method", run=uids["trained"])
    assert len(app.get("plotly_chart")) == 9
    text = words(app)
    with TraceReader.open(folder, uids["trained"]) as reader:
        heads, spans = reader.span_heads(), reader.spans().set_index("span")
        stored = int(heads["cold_bytes"].sum())
        exact = sum(int(spans.at[s, "tok_end"] - spans.at[s, "tok_start"]) * 2 * 32 * 4 for s in heads["span"])
        rates = reader.head_cube("zoom_rate")
    assert re.search(rf"{re.escape(si_bytes(stored))} .* {re.escape(si_bytes(exact))} .*\({stored / exact:.2f}\)", text)
    assert f"{heads['form'].eq('raw').mean():.0%} of {len(heads)} (span, layer, KV head) are stored raw" in text
    assert f"Mean zoom rate {np.nanmean(rates):.3f}" in text
    assert "not recorded" not in text
    assert "eq. 14 adds up" in text
    assert "rotary embedding" not in text


def test_a_run_with_keys_before_the_rotary_embedding_shows_both_errors(
    visit: Visit, made: tuple[Path, dict[str, str]]
) -> None:
    folder, uids = made
    app = visit(folder, "method", run=uids["pre_rope"])
    assert len(app.get("plotly_chart")) == 10
    with TraceReader.open(folder, uids["pre_rope"]) as reader:
        table = sekv_table.per_span(sekv_table.per_head(reader))
    assert (
        f"keep {table['rank_k'].mean():.1f} components before and {table['rank_k_post_rope'].mean():.1f} after"
        in words(app)
    )
    assert (table["err_k_pre_rope"] < table["err_k_post_rope"]).all()


def test_a_run_without_zoom_and_factors_says_what_it_has_not(visit: Visit, made: tuple[Path, dict[str, str]]) -> None:
    folder, uids = made
    text = words(visit(folder, "method", run=uids["off"]))
    assert "Zoom rate was not" in text
    assert sentences.NO_RANKS in text
    assert sentences.NO_FACTORS in text
    assert "100% of" in text
    assert sentences.NO_SPAN_SCORES in text


def test_a_run_with_whole_heads_says_which_they_are(visit: Visit, made: tuple[Path, dict[str, str]]) -> None:
    folder, uids = made
    with TraceReader.open(folder, uids["whole"]) as reader:
        rows = reader.journal("whole")
        rates = reader.head_cube("zoom_rate")
    whole = [
        (int(layer), int(head))
        for layer, of in zip(rows["layer"], rows["values"], strict=True)
        for head in of.nonzero()[0]
    ]
    layer, head = whole[0]
    app = visit(folder, "method", run=uids["whole"], layer=layer, head=head * 4)
    text = words(app)
    assert f"{len(whole)} of 12 KV heads" in text
    assert f"L{layer} KV{head} keeps every token" in text
    assert np.isnan(rates[:, layer, head * 4]).all()
    assert f"Mean zoom rate {np.nanmean(rates):.3f}" in text
    assert "keep every token" not in words(visit(folder, "method", run=uids["trained"]))


def test_another_step_layer_and_head_show_their_scores(visit: Visit, made: tuple[Path, dict[str, str]]) -> None:
    folder, uids = made
    app = visit(folder, "method", run=uids["trained"], step=2, layer=4, head=6)
    assert [box.value for box in app.number_input] == [2, 4, 1]
    app.number_input[0].set_value(5)
    app.number_input[2].set_value(0)
    app.run()
    assert not app.exception
    with TraceReader.open(folder, uids["trained"]) as reader:
        frame = reader.scores(5, 4, 0)
    assert f"{len(frame)} of {frame.attrs['candidates']} candidates are logged" in words(app)
    assert any("L4 KV0 at step 5" in chart.proto.spec for chart in app.get("plotly_chart"))


@pytest.mark.parametrize("which", ["whole", "summary", "cancelled"])
def test_made_up_and_partial_runs_have_the_view_too(visit: Visit, runs: Runs, which: str) -> None:
    assert "What moved" in words(visit(runs.folder, "method", run=getattr(runs, which)))


def test_the_table_of_spans_is_the_journal_and_the_ledger(made: tuple[Path, dict[str, str]]) -> None:
    """Ranks of the journal also where the span lies raw; where it lies as factors they are those of the stored unit."""
    folder, uids = made
    with TraceReader.open(folder, uids["trained"]) as reader:
        frame, stored = sekv_table.per_head(reader), reader.span_heads()
        ids = reader.journal("spans")["values"].iloc[0]
        one = reader.journal("rank_v")
        cell = one[(one["layer"] == 3) & (one["kv_head"] == 1)]["values"].iloc[0]
    assert len(frame) == len(stored)
    mine = frame[(frame["layer"] == 3) & (frame["kv_head"] == 1)].set_index("span")["rank_v"]
    assert {int(s): r for s, r in zip(ids, cell, strict=True)} == {s: r for s, r in mine.items() if s in set(ids)}
    assert frame["rank_k"].notna().all()
    both = frame.merge(stored, on=["span", "layer", "kv_head"], suffixes=("", "_stored"))
    factors = both[both["form"] == "factors"]
    assert len(factors)
    assert (factors["rank_k"] == factors["rank_k_stored"]).all()
    size = (factors["rank_k"] + factors["rank_v"]) * (factors["tokens"] + 32 + 1) * 4
    assert (size == factors["cold_bytes"]).all(), "eq. 18, bytes of float32"
    table = sekv_table.per_span(frame)
    assert table["factor_bytes"].sum() + table["raw_form_bytes"].sum() == stored["cold_bytes"].sum()
    assert table["raw_share"].mean() == pytest.approx(frame["form"].eq("raw").mean())
