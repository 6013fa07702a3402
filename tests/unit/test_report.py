"""kvlens report: one HTML file that fetches nothing, escapes what came from data, and says what was recorded."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import duckdb
import plotly.graph_objects as go
import pytest
from pairruns import PARTED, PairRuns, write_pair
from typer.testing import CliRunner
from uiruns import MARKUP

from kvlens.app.report import report_bytes
from kvlens.app.report.markup import Figures, safe, script_json, table
from kvlens.app.report.run import answer, facts, parameters, verdict_text
from kvlens.cli.main import app
from kvlens.lens.verdict import verdict
from kvlens.metaparts import Counterfactual, Held
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader
from tests.synthetic import write_synthetic

#: Attributes by which a page fetches something or leads elsewhere.
LINKS = (
    "src",
    "href",
    "action",
    "data",
    "poster",
    "srcset",
    "formaction",
    "ping",
    "background",
    "cite",
    "manifest",
    "xlink:href",
)


class Page(HTMLParser):
    """What of a page could fetch, run or lead away."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self.tags: set[str] = set()
        self.handlers: list[str] = []
        self.styles: list[str] = []
        self.policy = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.tags.add(tag)
        self._inside = tag
        self.links += [str(value) for name, value in attributes if name in LINKS]
        self.handlers += [name for name in given if name.startswith("on")]
        self.styles += [str(given["style"])] if "style" in given else []
        if tag == "script":
            self.scripts.append(given)
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(given["content"])

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self.styles.append(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> PairRuns:
    return write_pair(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def alone(runs: PairRuns) -> str:
    with TraceReader.open(runs.folder, runs.run) as reader:
        return report_bytes(reader).decode()


@pytest.fixture(scope="module")
def beside(runs: PairRuns) -> str:
    with TraceReader.open(runs.folder, runs.run) as reader, TraceReader.open(runs.folder, runs.reference) as other:
        return report_bytes(reader, other).decode()


def body(text: str) -> str:
    """The page without the drawing library and the figures' data."""
    return re.sub(r"<script.*?</script>", "", text, flags=re.S)


def specs(text: str) -> list[dict[str, object]]:
    return [
        json.loads(found)
        for found in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, flags=re.S)
    ]


@pytest.mark.parametrize("which", ["alone", "beside"])
def test_nothing_is_fetched_and_nothing_leads_away(which: str, request: pytest.FixtureRequest) -> None:
    page = Page(text := request.getfixturevalue(which))
    assert page.links
    assert all(link.startswith("#section-") for link in page.links)
    assert not [style for style in page.styles if "url(" in style or "@import" in style]
    assert page.tags.isdisjoint({"link", "iframe", "img", "object", "embed", "base", "form"})
    assert page.handlers == []
    assert re.search(r"https?://", body(text)) is None
    assert "default-src 'none'" in page.policy
    nonce = re.search(r"script-src 'nonce-([0-9a-f]{32})'", page.policy)
    assert nonce
    running = [script for script in page.scripts if script.get("type") != "application/json"]
    assert [script.get("nonce") for script in running] == [nonce.group(1)] * 2
    assert text.count("plotly.js v") <= 2


def test_text_of_tokens_is_shown_and_never_markup(runs: PairRuns) -> None:
    with TraceReader.open(runs.folder, runs.run) as reader:
        reader.meta = reader.meta.model_copy(
            update={
                "answer": "<script>alert(1)</script>",
                "task": '"><img src=x onerror=alert(2)>',
                "model": "$body${nonce}",
            }
        )
        reader.error, reader.status = "</table><b>bad</b>", "failed"
        text = report_bytes(reader).decode()
    page = Page(text)
    assert "b" not in page.tags
    assert page.handlers == []
    assert len([script for script in page.scripts if script.get("type") != "application/json"]) == 2
    assert html.escape("<script>alert(1)</script>") in text
    assert "$body${nonce}" in body(text)
    assert MARKUP not in text
    assert MARKUP.replace("<", "\\u003c") not in text


def test_figures_data_cannot_end_their_element() -> None:
    figures = Figures()
    figure = go.Figure(go.Scatter(x=[1], y=[2], hovertext=["</script><script>alert(1)</script> & \u2028"]))
    assert 'id="figure-0"' in figures.place(figure, 'a "map"')
    scripts = figures.scripts()
    assert scripts.count("</script>") == 1
    assert "&" not in scripts
    assert json.loads(script_json('{"a": "</script>&\u2028"}')) == {"a": "</script>&\u2028"}
    assert specs(scripts)[0]["data"][0]["hovertext"][0].startswith("</script>")  # type: ignore[index]


def test_pieces_escape() -> None:
    assert safe('<a href="x">') == "&lt;a href=&quot;x&quot;&gt;"
    assert safe(None) == "not recorded"
    assert "<td>&lt;i&gt;</td>" in table(("a", "b"), [("x", "<i>")])


def test_the_report_says_what_was_recorded(runs: PairRuns, alone: str) -> None:
    said = html.unescape(body(alone))
    assert f"Lost at step {PARTED}" in said
    assert "Missed most by L" in said
    with TraceReader.open(runs.folder, runs.run) as reader:
        missed = verdict(reader).missed
    assert missed is not None
    assert f"L{missed.layer} KV{missed.kv_head}" in said
    assert re.search(r">L\d KV\d, span \d+</th><td>\d\.\d\d</td><td>0\.\d{4}</td>", said), "effect and regret"
    assert re.search(r"regret 0\.\d{3}; [^<]* \d\.\d\d of \d+\.\d\d logits", said)
    assert "Expected".lower() in said
    assert "4172" in said
    titles = [spec["layout"].get("title", {}).get("text", "") for spec in specs(alone)]  # type: ignore[union-attr]
    assert any("What full KV would have read" in title for title in titles)
    assert any(title.startswith("Coverage") for title in titles)
    assert any(title.startswith("Own-query regret") for title in titles)
    assert "decided by" in said
    assert "our decision" in said or "not described here" in said
    assert "A and B" not in said


def test_tokens_that_were_fed_are_no_answer_of_the_methods(runs: PairRuns) -> None:
    with TraceReader.open(runs.folder, runs.run) as reader:
        assert "generated</th>" in answer(reader)
        reader.meta = reader.meta.model_copy(update={"forced": True, "output_text": " 4172."})
        said = html.unescape(answer(reader))
    assert "fed, full KV's tokens</th>" in said
    assert "generated" not in said
    assert "right</th><td>not judged" in said


def test_the_report_says_what_full_kv_answered(runs: PairRuns) -> None:
    with TraceReader.open(runs.folder, runs.run) as reader:
        assert "full KV generated" not in answer(reader), "not recorded"
        given = {"answer": "58214", "output_text": "9999", "reference_output": "<i>1951</i>"}
        reader.meta = reader.meta.model_copy(update=given)
        said = answer(reader)
        assert "full KV generated</th><td>&lt;i&gt;1951&lt;/i&gt;</td>" in said
        assert "full KV&#x27;s right</th><td>no</td>" in said
        assert "so is full KV&#x27;s (&#x27;&lt;i&gt;1951" in verdict_text(reader, verdict(reader))
        reader.meta = reader.meta.model_copy(update={"reference_output": "58214"})
        assert "full KV&#x27;s right</th><td>yes</td>" in answer(reader)
        reader.meta = reader.meta.model_copy(update={"forced": True})
        assert "full KV generated" not in answer(reader), "it was fed that text"


def test_a_value_that_is_not_the_papers_is_not_called_the_papers(runs: PairRuns) -> None:
    with TraceReader.open(runs.folder, runs.run) as reader:
        reader.meta = reader.meta.model_copy(
            update={"method": "freekv", "config": {"window": 16, "sinks": 128, "tokens": 0, "recall": "misses"}}
        )
        said = html.unescape(parameters(reader))
    assert "window</th><td>16</td><td>W</td><td>this run, instead" in said
    assert "sinks</th><td>128</td><td>S</td><td>the paper</td>" in said
    assert "the paper preset's 2048" in said
    assert said.count("our decision") == 1


def test_two_runs_stand_beside_each_other(beside: str) -> None:
    said = html.unescape(body(beside))
    assert f"divergence at step {PARTED}" in said
    assert "B beside A" in said
    heat = [trace for spec in specs(beside) for trace in spec["data"] if trace.get("name") == "B − A"]  # type: ignore[union-attr]
    assert len(heat) == 2
    assert all(trace["zmid"] == 0 and trace["zmin"] == -trace["zmax"] for trace in heat)


def test_runs_of_other_prompts_are_totals_only(runs: PairRuns) -> None:
    with TraceReader.open(runs.folder, runs.run) as reader, TraceReader.open(runs.folder, runs.other) as other:
        text = report_bytes(reader, other).decode()
    assert "different prompts" in text
    assert "B − A" not in "".join(json.dumps(spec, ensure_ascii=False) for spec in specs(text))


def test_a_counterfactual_says_what_was_held_and_what_that_changed(runs: PairRuns) -> None:
    with TraceReader.open(runs.folder, runs.run) as reader:
        held = Held(span=7, tok_start=30, tok_end=46, heads=((1, 0), (2, 1)), from_step=2)
        tried = Counterfactual(
            kl_before=4.5,
            kl_after=0.01,
            answer_before="<u>9</u>",
            answer_after="4172",
            expected_from="task",
            restored=True,
            held_bytes=2_000_000,
        )
        reader.meta = reader.meta.model_copy(update={"hold": (held,), "whatif": tried})
        text = report_bytes(reader).decode()
    said = html.unescape(body(text))
    assert "4172" in said
    assert "came back" in said
    assert "L1 KV0, L2 KV1" in said
    assert "2 MB" in said
    assert "u" not in Page(text).tags


def test_a_run_without_a_loss_says_so(tmp_path: Path) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 6, 8, lens=False, trace_level="summary", answer=None)
    with TraceReader.open(tmp_path, uid) as reader:
        said = html.unescape(body(report_bytes(reader).decode()))
    assert said.count("not recorded") >= 2
    assert "Lost at step" not in said


def test_a_run_that_lost_nothing_has_no_head_outlined_and_its_line_where_kl_is_largest(tmp_path: Path) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 6, 8, loss_step=6, oracle={"every": 2, "layers": [1]})
    with TraceReader.open(tmp_path, uid) as reader:
        loss = reader.loss()
        text = report_bytes(reader).decode()
    said, drawn = html.unescape(body(text)), specs(text)
    assert loss["agrees"].all()
    assert '<p class="calm">Nothing was lost: at all 6 steps' in said
    assert f"marks step {loss.loc[loss['kl'].idxmax(), 'step']}," in said
    maps = [spec for spec in drawn if any(trace["type"] == "heatmap" for trace in spec["data"])]  # type: ignore[union-attr]
    assert maps
    assert not any(shape["type"] == "rect" for spec in maps for shape in spec["layout"].get("shapes", []))  # type: ignore[attr-defined]
    assert "Outlined" not in said
    assert "one step in 2 and layers 1" in said
    assert "{'every'" not in said
    assert "<td>True</td>" not in said


def test_a_run_whose_kl_was_not_recorded_at_any_step_marks_the_first_step(tmp_path: Path) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 6, 8, loss_step=6, oracle={"every": 2, "layers": [1]})
    trace = tmp_path / uid / "trace.duckdb"
    trace.chmod(0o644)
    with duckdb.connect(str(trace)) as con:
        con.execute("UPDATE loss SET kl = NULL")
    with TraceReader.open(tmp_path, uid) as reader:
        loss = reader.loss()
        text = report_bytes(reader).decode()
    assert len(loss) > 1
    assert loss["kl"].isna().all()
    marked = int(loss["step"].iloc[0])
    assert f"marks step {marked}," in html.unescape(body(text))
    drawn = [spec for spec in specs(text) if any(trace.get("name") == "KL" for trace in spec["data"])]  # type: ignore[union-attr]
    assert len(drawn) == 1
    lines = [shape for shape in drawn[0]["layout"]["shapes"] if shape["type"] == "line"]  # type: ignore[index]
    assert {(line["x0"], line["x1"]) for line in lines} == {(marked, marked)}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((None, None, None), "temperature not recorded, top-p not recorded, seed not recorded"),
        ((0.0, 1.0, 0), "temperature 0.0, top-p 1.0, seed 0"),
        ((0.7, None, 3), "temperature 0.7, top-p not recorded, seed 3"),
    ],
)
def test_the_settings_of_sampling_are_values_or_not_recorded(
    runs: PairRuns, values: tuple[float | None, ...], expected: str
) -> None:
    with TraceReader.open(runs.folder, runs.run) as reader:
        update = dict(zip(("temperature", "top_p", "seed"), values, strict=True))
        reader.meta = reader.meta.model_copy(update=update)
        assert f"sampling</th><td>{expected}</td>" in facts(reader)


def test_a_run_that_lost_says_what_is_outlined(alone: str) -> None:
    said = html.unescape(body(alone))
    assert said.count("Outlined: ") == 2
    assert f"marks step {PARTED}," in said


def test_the_command_writes_the_file_and_says_its_size(runs: PairRuns, tmp_path: Path) -> None:
    out = tmp_path / "a new folder" / "report.html"
    done = CliRunner().invoke(
        app, ["report", runs.run, "--against", runs.reference, "--out", str(out), "--runs", str(runs.folder)]
    )
    assert done.exit_code == 0, done.output
    assert f"{out.stat().st_size:,} bytes" in done.output
    assert 1_000_000 < out.stat().st_size < 8_000_000
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    below = ["report", runs.run, "--out", str(out / "r.html"), "--runs", str(runs.folder)]
    assert f"'{out.name}'" in str(CliRunner().invoke(app, below).exception)


@pytest.mark.parametrize(("uid", "other"), [("20260102-999999-none", None), ("..", None), ("run", "run")])
def test_bad_requests_are_one_sentence(runs: PairRuns, tmp_path: Path, uid: str, other: str | None) -> None:
    argv = ["report", getattr(runs, uid, uid), "--out", str(tmp_path / "r.html"), "--runs", str(runs.folder)]
    done = CliRunner().invoke(app, argv + (["--against", getattr(runs, other)] if other else []))
    assert isinstance(done.exception, TraceError)
    assert list(tmp_path.iterdir()) == []
