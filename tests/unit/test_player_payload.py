"""What the player is sent says the same as the reader."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_support import make_step, write

from kvlens.app import gallery
from kvlens.app.ui.common.spantext import window_range
from kvlens.app.ui.replay.details import metric_table
from kvlens.decisions import Decisions
from kvlens.lens.verdict import verdict
from kvlens.player import lens, payload
from kvlens.player.codec import NOT_RECORDED, pack, quantise, unpack
from kvlens.player.opening import Place
from kvlens.player.script import WEB
from kvlens.player.sparse import places
from kvlens.rows import SPAN_STATES
from kvlens.store.reader import TraceReader
from kvlens.store.session import Session
from kvlens.text.passages import continued
from kvlens.text.words import STATES
from tests.synthetic import write_synthetic


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceReader]:
    folder = tmp_path_factory.mktemp("runs")
    uid = write_synthetic(folder, 3, 8, 2, 40, 20, seed=1, prompt_tokens=300, needle=[[30, 60]])
    with TraceReader.open(folder, uid) as opened:
        yield opened


def test_the_player_has_a_name_and_a_colour_for_every_state() -> None:
    source = (WEB / "color.js").read_text(encoding="utf-8")
    found = dict(re.findall(r"const (STATE_WORDS|STATE_COLORS) = (\[.*\]);", source))
    assert json.loads(found["STATE_WORDS"]) == [STATES[state] for state in SPAN_STATES]
    colors = [tuple(color) for color in json.loads(found["STATE_COLORS"])]
    assert len(set(colors)) == len(SPAN_STATES)


def test_a_message_comes_back_as_it_was_packed() -> None:
    arrays = {"a": np.arange(5, dtype=np.uint8), "b": np.array([0.5, np.nan]), "c": np.arange(3, dtype=np.int32)}
    header, back = unpack(pack({"text": "<b>é\n"}, arrays))
    assert header["text"] == "<b>é\n"
    assert all(np.array_equal(back[name], array, equal_nan=name == "b") for name, array in arrays.items())


def test_the_message_that_javascript_unpacks_is_what_is_packed_here() -> None:
    """tests/js/codec.test.js reads the same file."""
    stored = json.loads((Path(__file__).parents[1] / "js/message.json").read_text(encoding="utf-8"))
    arrays = {
        name: np.array([np.nan if value is None else value for value in values], stored["types"][name])
        for name, values in stored["arrays"].items()
    }
    assert base64.b64encode(pack(stored["header"], arrays)).decode() == stored["base64"]


def test_codes_keep_four_decimals_of_a_share_and_mark_what_is_missing() -> None:
    values = np.array([0.0, 1e-4, 0.1234, 0.9999, 1.0, np.nan])
    codes = quantise(values, 0.0, 1.0)
    assert codes[-1] == NOT_RECORDED
    assert np.round(codes[:-1] / 65534, 4) == pytest.approx(values[:-1], abs=1e-9)
    assert codes[:-1].max() == 65534


def test_every_cube_says_what_the_reader_says(reader: TraceReader) -> None:
    names = payload.per_step_metrics(reader)
    header, arrays = unpack(payload.run_payload(reader, "id", names, names))
    for metric in header["metrics"]:
        codes = arrays[f"cube:{metric['name']}"].astype(float)
        decoded = np.where(codes == NOT_RECORDED, np.nan, metric["lo"] + codes / 65534 * (metric["hi"] - metric["lo"]))
        truth = payload.cube(reader, metric["name"]).ravel()
        assert np.array_equal(np.isnan(decoded), np.isnan(truth))
        assert np.nanmax(np.abs(decoded - truth)) <= (metric["hi"] - metric["lo"]) / 131068 * 1.01 + 1e-6


def test_tokens_tracks_and_spans_are_the_recorded_ones(reader: TraceReader) -> None:
    names = payload.per_step_metrics(reader)
    header, arrays = unpack(payload.run_payload(reader, "id", names, names[:1]))
    assert header["texts"] == list(reader.tokens()["text"])
    assert header["prompt"] == 300
    assert len(header["spans"]) == len(reader.spans())
    assert arrays["track:h2d"].tolist() == reader.steps()["h2d_bytes"].tolist()
    assert [metric["loaded"] for metric in header["metrics"]] == [True] + [False] * (len(names) - 1)


@pytest.mark.parametrize(("layer", "kv_head"), [(0, 0), (2, 1)])
def test_states_replayed_from_changes_equal_the_readers_at_every_step(
    reader: TraceReader, layer: int, kv_head: int
) -> None:
    spans = reader.spans()
    changes = payload.state_changes(spans, reader.state_changes(layer, kv_head))
    ids = spans["span"].tolist()
    for step in range(reader.n_steps):
        now: dict[int, str] = {}
        for at, index, state in zip(
            changes["change_step"], changes["change_span"], changes["change_state"], strict=True
        ):
            if at <= step:
                now[ids[index]] = SPAN_STATES[state]
        truth = reader.span_states(step, layer, kv_head)
        assert {span: now[span] for span in truth["span"]} == dict(zip(truth["span"], truth["state"], strict=True))


def test_the_states_of_a_layer_are_those_of_its_heads(reader: TraceReader) -> None:
    for layer in range(reader.n_layers):
        for kv_head, changes in enumerate(reader.state_changes_of_layer(layer)):
            pd.testing.assert_frame_equal(changes, reader.state_changes(layer, kv_head))
    assert kv_head == reader.kv_heads - 1
    assert len(changes)


def test_only_states_of_spans_that_lost_are_read(reader: TraceReader, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, list[int]]] = []
    rows = Session.rows

    def note(session: Session, sql: str, **values: Any) -> list[tuple[Any, ...]]:
        if "$spans" in sql:
            told.append((sql, values["spans"]))
        return rows(session, sql, **values)

    monkeypatch.setattr(Session, "rows", note)
    losses = reader.summary_losses(lens.LEAST_HOLE)
    assert losses["q_head"].nunique() > 1
    lens.worst(reader, places(reader.spans()))
    passes = losses.groupby(["step", "span"]).size().max()  # of losses of one place, each looks at the next smaller one
    assert 0 < len(told) <= 2 * passes * losses["layer"].nunique()
    assert {span for _, spans in told for span in spans} <= set(losses["span"])


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_asked_states_are_those_that_changes_tell(reader: TraceReader, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = reader.spans()["span"].to_numpy()
    layer, count = int(rng.integers(reader.n_layers)), int(rng.integers(0, 12))
    steps, heads = rng.integers(0, reader.n_steps, count), rng.integers(0, reader.kv_heads, count)
    spans = rng.choice(ids, count)
    found = reader.attended_states(layer, steps, heads, spans)
    for step, head, span, state in zip(steps, heads, spans, found, strict=True):
        changes = reader.state_changes(layer, int(head))
        known = changes.loc[(changes["span"] == span) & (changes["step"] <= step), "state"]
        assert state == (known.iloc[-1] if len(known) else "")


def test_a_metric_taken_away_has_a_row_per_step_and_query_head(reader: TraceReader) -> None:
    table = metric_table(reader, "resident_bytes").set_index(["step", "layer", "q_head"])
    assert len(table) == reader.n_steps * reader.n_layers * reader.q_heads
    row = table.loc[(7, 2, 5)]
    assert row["kv_head"] == 1
    assert row["Resident bytes (bytes)"] == reader.kv_cube("resident_bytes")[7, 2, 1]


def test_a_slice_holds_the_masses_of_its_head(reader: TraceReader) -> None:
    header, arrays = unpack(payload.slice_payload(reader, "id", Place(5, 1, 6, None, "entropy"), 3))
    assert (header["step"], header["layer"], header["head"], header["rev"]) == (5, 1, 6, 3)
    truth = reader.span_mass(1, 6)
    first, last = arrays["head_start"][5], arrays["head_start"][6]
    found = arrays["head_mass"][first:last] / 65534
    assert found == pytest.approx(truth.loc[truth["step"] == 5, "mass"].to_numpy(), abs=1e-5)


def test_the_window_is_what_no_other_living_span_covers() -> None:
    spans = pd.DataFrame(
        {
            "kind": ["sink", "window", "page", "page"],
            "tok_start": [0, 4, 4, 8],
            "tok_end": [4, 4, 8, 12],
            "born_step": [-1, -1, -1, 3],
            "died_step": [None, None, None, None],
        }
    ).astype({"died_step": "float64"})
    assert window_range(spans, 0, 10) == (8, 10)
    assert window_range(spans, 3, 13) == (12, 13)
    assert window_range(spans, 3, 12) == (12, 12)


def test_a_needle_is_the_tokens_its_characters_touch() -> None:
    tokens = pd.DataFrame({"char_start": [0, 3, 7, None], "char_end": [3, 7, 9, None]})
    assert payload.needle_tokens(tokens, [(4, 8), (100, 110)]) == [[1, 3]]


def test_jumps_lead_to_the_loss_the_worst_regret_and_every_recall(reader: TraceReader) -> None:
    found = verdict(reader)
    assert found is not None
    assert found.missed is not None
    places = lens.jumps(reader, found)
    at = {
        kind: [place for place in places if place["kind"] == kind]
        for kind in ("loss", "regret", "correction", "recall")
    }
    missed = found.missed
    assert at["loss"] == [
        {"kind": "loss", "step": found.step, "layer": missed.layer, "head": missed.q_head, "span": missed.span}
    ]
    regret = reader.head_cube("regret")
    (worst,) = at["regret"]
    assert regret[worst["step"], worst["layer"], worst["head"]] == np.nanmax(regret)
    listed = reader.oracle(worst["step"], worst["layer"], worst["head"])
    assert float(listed.set_index("span")["regret"][worst["span"]]) == float(listed["regret"].max())
    assert at["correction"] == []
    recalls = reader.events()
    recalls = recalls[recalls["kind"].isin(("recall", "zoom_in"))]
    assert [place["step"] for place in at["recall"]] == sorted({int(step) for step in recalls["step"] if step >= 0})
    assert "lost" not in {place["kind"] for place in places}, "a free run is compared up to its first loss"
    assert [place["kind"] for place in lens.jumps(reader, None)] == ["regret", *["recall"] * len(at["recall"])]


def test_the_player_finds_as_many_corrections_as_were_made(tmp_path: Path) -> None:
    """Also those that moved nothing, since all pages were on the device, and have no event."""
    sizes, rng = (2, 4, 2, 2), np.random.default_rng(5)
    records = []
    for step in range(4):
        layer, kv_head = (rng.random((2, 2)) < 0.5).nonzero()
        corrected = np.zeros((2, 4), np.float32)
        for member in (0, 1):
            corrected[layer, 2 * kv_head + member] = 1
        columns: dict[str, np.ndarray | float] = {"layer": layer, "kv_head": kv_head, "requested": 3, "granted": 3}
        record = make_step(rng, step, sizes)
        head = record.head | {"corrected": corrected}
        made = Decisions.filled(len(layer), "correction", "spans", columns)
        records.append(replace(record, head=head, decisions=made, events=[]))
    with write(tmp_path, records, sizes) as reader:
        places = lens.corrections(reader)
        assert len(places) * 2 == np.nansum(reader.head_cube("corrected")) > 0
        assert reader.head_table()["n_corrected"].sum() == len(places) * 2
        assert all(reader.head_cube("corrected")[tuple(place)] == 1 for place in places)


def test_every_lost_step_of_a_forced_run_can_be_jumped_to(tmp_path: Path) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 24, 14, seed=3, forced=True, loss_step=4)
    with TraceReader.open(tmp_path, uid) as forced:
        loss = forced.loss()
        places = lens.jumps(forced, verdict(forced))
    lost = loss.loc[~loss["agrees"], "step"].tolist()
    assert [place["step"] for place in places if place["kind"] in ("loss", "lost")] == lost
    assert len(lost) > 1


def test_the_track_of_divergence_has_gaps_where_nothing_was_compared(reader: TraceReader) -> None:
    header, arrays = unpack(payload.run_payload(reader, "id", ["entropy"], ["entropy"], verdict(reader)))
    loss = reader.loss()
    track = next(track for track in header["tracks"] if track["name"] == "kl")
    assert track["unit"] == "nats"
    assert np.array_equal(arrays["track:kl"][: len(loss)], loss["kl"])
    assert np.isnan(arrays["track:kl"][len(loss) :]).all()
    assert list(arrays[f"marks:{track['marks']}"]) == loss.loc[~loss["agrees"], "step"].tolist()
    assert header["diverged"] == int(loss["step"].iloc[-1])


def test_a_character_of_several_tokens_is_shown_by_the_first() -> None:
    ranges = [
        (None, None),
        (0, 1),
        (0, 1),
        (1, 2),
        (2, 4),
        (3, 4),
        (3, 4),
        (4, 7),
        (None, None),
    ]  # two tokens of one, then three
    frame = pd.DataFrame(ranges, columns=["char_start", "char_end"])
    assert continued(frame) == [2, 5, 6]


def masses(codes: np.ndarray) -> np.ndarray:
    """Shares of their codes."""
    return codes.astype(np.float64) / 65534


def test_a_slice_holds_what_full_kv_wanted_of_the_selected_head_at_every_step(reader: TraceReader) -> None:
    _, arrays = unpack(payload.slice_payload(reader, "id", Place(5, 1, 6, 4, "entropy"), 3))
    spans = reader.spans()["span"].to_numpy()
    seen = 0
    for step in range(reader.n_steps):
        rows = slice(*arrays["wanted_start"][step : step + 2])
        truth = reader.oracle(step, 1, 6)
        seen += len(truth)
        assert spans[arrays["wanted_span"][rows]].tolist() == truth["span"].tolist(), "most wanted first"
        for name, column in (("full", "full"), ("mass", "mass"), ("hole", "unread")):
            np.testing.assert_allclose(masses(arrays[f"wanted_{name}"][rows]), truth[column], atol=1e-5)
        tail = reader.oracle_tail(step, 1, 6)
        np.testing.assert_allclose(arrays["wanted_tail"][step], tail, atol=1e-6)
        lost = reader.lost_tokens(step)
        lost = lost[(lost["layer"] == 1) & (lost["q_head"] == 6)]
        rows = slice(*arrays["lost_start"][step : step + 2])
        assert arrays["lost_pos"][rows].tolist() == lost["pos"].tolist()
        np.testing.assert_allclose(masses(arrays["lost_mass"][rows]), lost["mass"], atol=1e-5)
    assert seen
    assert np.isfinite(arrays["wanted_tail"]).any()


def test_a_hole_of_any_head_is_that_of_the_head_that_lost_most(reader: TraceReader) -> None:
    """Where that head attended the span as its summary, what the summary did not get is the hole, and is marked."""
    _, arrays = unpack(payload.run_payload(reader, "id", [], []))
    spans = reader.spans()["span"].to_numpy()
    found = {}
    for step in range(reader.n_steps):
        for i in range(*arrays["worst_start"][step : step + 2]):
            marks = arrays["worst_head"][i], arrays["worst_summary"][i]
            found[step, int(spans[arrays["worst_span"][i]])] = masses(arrays["worst_hole"])[i], marks
    expected: dict[tuple[int, int], tuple[float, tuple[int, int]]] = {}
    for step in range(reader.n_steps):
        states = {
            (layer, kv_head): reader.span_states(step, layer, kv_head).set_index("span")["state"]
            for layer in range(reader.n_layers)
            for kv_head in range(reader.kv_heads)
        }
        for row in reader.oracle_step(step).itertuples():
            state = states[row.layer, row.kv_head].get(row.span)
            summary = row.unread < lens.LEAST_HOLE and state == "coarse"
            mass = row.regret if summary else row.unread
            place = step, int(row.span)
            if mass >= lens.LEAST_HOLE and mass > expected.get(place, (0.0, None))[0]:
                expected[place] = mass, (int(row.layer * reader.q_heads + row.q_head), int(summary))
    assert found.keys() == expected.keys() != set()
    for place, (mass, marks) in expected.items():
        np.testing.assert_allclose(found[place][0], mass, atol=1e-5)
        assert found[place][1] == marks
    assert {marks[1] for _, marks in expected.values()} == {0, 1}


def test_states_are_read_of_the_layers_that_lost_most_alone(
    reader: TraceReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, group = 5, reader.q_heads // reader.kv_heads
    states = reader.span_states(step, 1, 1)
    span = int(states.loc[states["state"] == "coarse", "span"].iloc[0])
    rows = [(step, 0, 0, span, 0.1), (step, 1, group, span, 0.3), (step, 2, 0, span, 0.2)]
    losses = pd.DataFrame(rows, columns=["step", "layer", "q_head", "span", "mass"])
    real, layers = reader.attended_states, []
    monkeypatch.setattr(reader, "summary_losses", lambda least: losses)
    monkeypatch.setattr(reader, "attended_states", lambda layer, *rest: layers.append(layer) or real(layer, *rest))
    for hole, read in ((0.05, [1]), (0.3, [])):
        holes = pd.DataFrame({"step": [step], "span": [span], "mass": [hole], "layer": [0], "q_head": [1]})
        monkeypatch.setattr(reader, "holes", lambda least, holes=holes: holes)
        arrays = lens.worst(reader, places(reader.spans()))
        assert layers == read, hole
        assert arrays["worst_summary"].tolist() == [len(read)]
        layers.clear()


def test_a_run_without_a_lens_has_no_track_and_no_place_of_it(tmp_path: Path) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 6, 10, lens=False)
    with TraceReader.open(tmp_path, uid) as plain:
        header, arrays = unpack(payload.run_payload(plain, "id", ["entropy"], ["entropy"], verdict(plain)))
        of_head = unpack(payload.slice_payload(plain, "id", Place(0, 0, 0, 1, "entropy"), 0))[1]
    assert not [name for name in (*arrays, *of_head) if name.startswith(("track:kl", "wanted", "lost", "worst"))]
    assert (header["diverged"], header["oracle"]) == (None, False)
    assert {place["kind"] for place in header["jumps"]} <= {"correction", "recall"}


def test_where_full_attention_stayed_behind_the_map_is_told_that_it_was_not_recorded(tmp_path: Path) -> None:
    loss = gallery.losses()[0]
    gallery.bring(loss, tmp_path)
    for uid, there in ((loss.uid, True), (loss.held.uid, False)):
        with TraceReader.open(tmp_path, uid) as opened:
            assert opened.meta.oracle is not None
            header, arrays = unpack(payload.run_payload(opened, "id", [], []))
            _, chosen = unpack(payload.slice_payload(opened, "id", Place(), 0))
        assert (header["oracle"], any(header["sampled"])) == (there, there)
        assert ("worst_start" in arrays, "wanted_start" in chosen, "wanted_tail" in chosen) == (there,) * 3


def test_a_page_is_sent_the_metric_in_view_and_a_file_more(reader: TraceReader) -> None:
    names = payload.per_step_metrics(reader)
    assert payload.loaded_metrics(reader, names, None) == names, "a small run is sent whole"
    cube_bytes = 2 * reader.n_steps * reader.n_layers * reader.q_heads
    assert payload.loaded_metrics(reader, names, names[4], cube_bytes // 2) == [names[4]]
    assert payload.loaded_metrics(reader, names, names[4], 3 * cube_bytes) == [names[4], *names[:2]]
    assert payload.CUBE_BYTES < 2 * (2 * 200 * 80 * 64) < payload.FILE_CUBE_BYTES


def test_a_run_that_stored_no_masses_does_not_name_the_steps_that_have_them(tmp_path: Path) -> None:
    ends = []
    for level in ("spans", "summary"):
        uid = write_synthetic(tmp_path, 2, 4, 2, 4, 6, trace_level=level, uid=f"20260101-000000-{level}")
        with TraceReader.open(tmp_path, uid) as opened:
            assert opened.meta.oracle is not None
            ends.append(lens.sampling(opened))
    assert ends[0].startswith(";")
    assert ends[1].startswith(":")
