"""A replay as one file: it sends no request, runs no text of a trace, and holds what the player in the app is sent."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pytest
from playerpage import ReplayFile
from typer.testing import CliRunner

from kvlens.cli.main import app
from kvlens.lens.verdict import verdict
from kvlens.player import payload
from kvlens.player.codec import unpack
from kvlens.player.opening import Place, opening
from kvlens.player.page import ReplayTooLarge, player_html
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader
from tests.synthetic import write_synthetic

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>${x}`\u2028\u202e\x00'\"&$title"
CODE_BYTES = 2_000_000
"""bytes of a replay file without its trace, at most"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def uid(folder: Path) -> str:
    made = write_synthetic(folder, 3, 8, 2, 20, 20, seed=1, prompt_tokens=300, needle=[[30, 60]], model=HOSTILE)
    trace = folder / made / "trace.duckdb"
    trace.chmod(0o644)
    with duckdb.connect(str(trace)) as con:
        con.execute("UPDATE token SET text = $text WHERE pos IN (0, 40, 299, 305)", {"text": HOSTILE})
        con.execute("UPDATE loss SET ref_text = $text, top_text = $text", {"text": HOSTILE})
    return made


@pytest.fixture(scope="module")
def reader(folder: Path, uid: str) -> Iterator[TraceReader]:
    with TraceReader.open(folder, uid) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(reader: TraceReader) -> ReplayFile:
    return ReplayFile(player_html(reader, title=HOSTILE))


def test_it_names_no_address_and_its_policy_allows_its_own_sources_only(page: ReplayFile) -> None:
    assert page.links == []
    assert page.handlers == []
    assert "http:" not in page.code + "".join(page.sources["style"])
    assert "https:" not in page.code + "".join(page.sources["style"])
    for word in ("fetch(", "XMLHttpRequest", "WebSocket", "EventSource", "import(", "importScripts", "sendBeacon"):
        assert word not in page.code
    assert "url(" not in "".join(page.sources["style"])
    rules = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'{allowed(page.code)}'"
    assert rules["style-src"] == f"'{allowed(*page.sources['style'])}'"
    assert set(rules) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}


def allowed(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def test_text_of_a_trace_stays_text(page: ReplayFile, reader: TraceReader) -> None:
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert page.sources["title"] == [
        HOSTILE.replace("\u2028", "⟨U+2028⟩").replace("\u202e", "⟨U+202E⟩").replace("\x00", "⟨U+0000⟩")
    ]
    (run, _), *_ = page.messages()
    assert run["texts"][40].startswith("</script><img")
    assert "\u202e" not in "".join(run["texts"])
    with_defaults = ReplayFile(player_html(reader))
    assert with_defaults.tags == page.tags


def test_the_file_holds_the_run_and_every_head_as_the_app_sends_them(page: ReplayFile, reader: TraceReader) -> None:
    (run, run_arrays), *heads = page.messages()
    names = payload.ordered_metrics(reader)
    assert [metric["name"] for metric in run["metrics"]] == names
    assert run_arrays["track:h2d"].tolist() == reader.steps()["h2d_bytes"].tolist()
    place = opening(reader, names, verdict(reader))
    assert (place.step, place.span is not None) == (run["jumps"][0]["step"], True)
    assert sorted((header["layer"], header["head"]) for header, _ in heads) == [
        (layer, head) for layer in range(3) for head in range(8)
    ]
    for header, arrays in heads:
        here = Place(place.step, header["layer"], header["head"], place.span, place.metric)
        expected_header, expected = unpack(payload.slice_payload(reader, run["payload"], here, 0))
        assert header == expected_header
        assert arrays.keys() == expected.keys()
        assert all(np.array_equal(arrays[name], expected[name], equal_nan=True) for name in arrays)


def test_it_opens_at_the_step_of_loss_or_at_the_step_asked_for(page: ReplayFile, reader: TraceReader) -> None:
    found = verdict(reader)
    assert found is not None
    assert found.missed is not None
    first = page.messages()[1][0]
    assert [first[name] for name in ("step", "layer", "head", "span")] == [
        found.step,
        found.missed.layer,
        found.missed.q_head,
        found.missed.span,
    ]
    assert ReplayFile(player_html(reader, step=3)).messages()[1][0]["step"] == 3


def test_the_player_is_small_and_a_file_without_room_for_all_heads_reports_how_many_it_holds(
    reader: TraceReader,
) -> None:
    whole = player_html(reader)
    trace = max(ReplayFile(whole).sources["script"], key=len)
    code = len(whole.encode()) - len(trace)
    print(f"player without its trace: {code:,} bytes; trace of {reader.n_steps} steps, 24 heads: {len(trace):,} bytes")
    assert code <= CODE_BYTES
    every = len(base64.b64decode(trace))
    few = player_html(reader, most=every * 3 // 4)
    held = len(ReplayFile(few).messages()) - 1
    assert 0 < held < 24
    assert f"{held} of 24 query heads" in few
    assert "of 24 query heads" not in whole
    with pytest.raises(ReplayTooLarge) as refused:
        player_html(reader, most=1000)
    assert (refused.value.code, refused.value.most) == ("replay_too_large", 1000)
    assert refused.value.size > 1000


@pytest.mark.parametrize("step", [-1, 20])
def test_a_step_outside_the_run_is_refused(reader: TraceReader, step: int) -> None:
    with pytest.raises(TraceError):
        player_html(reader, step=step)


def test_a_run_of_summaries_and_a_run_without_a_lens_have_a_page(tmp_path: Path) -> None:
    summary = write_synthetic(tmp_path, 2, 4, 2, 8, 10, seed=3, trace_level="summary")
    plain = write_synthetic(tmp_path, 2, 4, 2, 6, 10, lens=False)
    for made in (summary, plain):
        with TraceReader.open(tmp_path, made) as opened:
            (run, _), *heads = ReplayFile(player_html(opened)).messages()
            assert (run["uid"], len(heads)) == (made, 8)


def test_the_command_writes_the_file(folder: Path, uid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["report", uid, "--player", "--runs", str(folder)])
    assert done.exit_code == 0, done.output
    made = tmp_path / f"kvlens-{uid}-replay.html"
    assert [path.name for path in tmp_path.iterdir()] == [made.name]
    assert ReplayFile(made.read_text(encoding="utf-8")).messages()[0][0]["uid"] == uid
    both = CliRunner().invoke(app, ["report", uid, "--player", "--against", uid, "--runs", str(folder)])
    assert isinstance(both.exception, ValueError)
