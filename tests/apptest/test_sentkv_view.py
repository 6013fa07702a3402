"""SentKVCompress's view on the Method page, over real runs of the demo model: what it shows is what the trace holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import task_prompt
from test_pages import words
from uiruns import Visit

from kvlens.app.methods import sentkv
from kvlens.app.ui.common import sentences
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.text.units import si_bytes

ARMS: dict[str, tuple[str, dict[str, str]]] = {
    "truncated": ("0.5", {}),
    "untruncated": ("0.5", {"truncate": "false", "dense_layers": "1"}),
    "everything": ("1", {}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, demo: Any) -> tuple[Path, dict[str, str]]:
    """A folder with one run per arm, and their ids."""
    folder = tmp_path_factory.mktemp("sentkv-runs")
    prompt, _ = task_prompt(demo, "needle", 512, max_new=16)
    uids = {}
    for name, (budget, overrides) in ARMS.items():
        request = RunRequest(method="sentkv", budget=budget, overrides=overrides, max_new=16, ignore_eos=True)
        uids[name] = carry_out(request, prompt.source, folder, lambda *_: None, lambda: False)[0]
    return folder, uids


def test_a_run_shows_chunks_reuse_and_what_truncation_cost(visit: Visit, made: tuple[Path, dict[str, str]]) -> None:
    folder, uids = made
    app = visit(folder, "method", run=uids["truncated"])
    assert len(app.get("plotly_chart")) == 7
    text = words(app)
    with TraceReader.open(folder, uids["truncated"]) as reader:
        table = sentkv.chunk_table(reader)
        prompt = "".join(reader.tokens().sort_values("pos")["text"])
        moved, reused = reader.kv_cube("h2d_bytes").sum(), reader.kv_cube("reused_tokens")
        wanted = reused + reader.kv_cube("recalled_tokens")
        ideal = reader.kv_cube("ideal_bytes").sum()
        recalled, tokens = reader.kv_cube("recalled_tokens"), reader.prompt_tokens()
        shares = [recalled[step].mean() / (tokens + step) for step in range(1, len(recalled))]
    assert f"{np.mean(shares):.1%} of all tokens" in text
    assert prompt.startswith("".join(table["text"]))
    assert (table["first"].to_numpy()[1:] == table["last"].to_numpy()[:-1] + 1).all()
    chunks = table[table["cut"] != "sinks"]
    assert f"{len(chunks)} chunks, mean length {chunks['tokens'].mean():.1f} tokens" in text
    assert f"reused {(reused[1:] / wanted[1:]).mean():.3f}" in text
    assert f"reusable {(1 - ideal_share(ideal, wanted, folder, uids['truncated'])):.3f}" in text
    assert f"{si_bytes(moved)} moved where {si_bytes(ideal)} had to: {moved / ideal - 1:.1%} more" in text
    assert "not recorded" not in text
    memory = words(visit(folder, "memory", run=uids["truncated"]))
    assert f"{si_bytes(moved - ideal)} ({moved / ideal - 1:.1%} more)" in memory


def ideal_share(_total: float, wanted: np.ndarray, folder: Path, uid: str) -> float:
    """Mean share of the wanted tokens that had to move, after the first step."""
    with TraceReader.open(folder, uid) as reader:
        return float((reader.kv_cube("ideal_bytes")[1:] / (2 * 32 * 4) / wanted[1:]).mean())


def test_a_run_without_truncation_says_so_and_leaves_dense_layers_out(
    visit: Visit, made: tuple[Path, dict[str, str]]
) -> None:
    folder, uids = made
    assert sentences.NOT_TRUNCATED in words(visit(folder, "method", run=uids["untruncated"]))
    with TraceReader.open(folder, uids["untruncated"]) as reader:
        reuse = sentkv.Reuse(reader)
    assert np.isnan(reuse.reused[:, 0]).all()
    np.testing.assert_allclose(reuse.reused, reuse.reusable, atol=1e-6)


def test_a_run_that_keeps_everything_says_what_it_has_not(visit: Visit, made: tuple[Path, dict[str, str]]) -> None:
    folder, uids = made
    text = words(visit(folder, "method", run=uids["everything"]))
    assert sentences.NOTHING_SELECTED in text
    assert "chunks, mean length" in text
    assert sentences.NO_TOKEN_BUDGET in text
