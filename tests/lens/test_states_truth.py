"""The state that a trace tells of a span, against the slots that the step's attention went through: per layer and KV
head, and of the moment at which it attended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvlens.demo.encode import demo_encode
from kvlens.demo.tasks import make_prompt
from kvlens.kernels.pool_attend import Live
from kvlens.lens.facts import Facts
from kvlens.lens.reasons import reason
from kvlens.memory.placement import Selection
from kvlens.memory.reads import Reads
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import PromptText
from kvlens.tiers.slots import ROLE, Slots

WHOLE_HEADS = {"router": "mean", "zoom_rate": "1", "form": "raw", "whole_share": "0.5", "coarse": "false"}
RUNS: dict[str, tuple[str, str, dict[str, str], int]] = {
    "freekv": ("freekv", "60%", {"page": "16", "sinks": "16", "window": "48"}, 6),
    "dense": ("freekv", "60%", {"page": "8", "sinks": "8", "window": "24", "dense_layers": "1"}, 10),
    "snapkv": ("snapkv", "30%", {}, 6),
    "h2o": ("h2o", "30%", {}, 6),
    "whole heads": ("sekv", "40%", WHOLE_HEADS, 24),
    "clusterkv": ("clusterkv", "30%", {"sinks": "4", "window": "16", "cluster": "16", "dense_layers": "0"}, 6),
    "pqcache": ("pqcache", "30%", {"sinks": "4", "window": "24", "bits": "4"}, 6),
    "infinigen": ("infinigen", "50%", {"partial": "0.125", "dense_layers": "0"}, 6),
    "sentencekv": ("sentencekv", "50%", {"sinks": "4", "window": "16", "longest": "32"}, 6),
    "sentkv": ("sentkv", "50%", {"length": "20"}, 6),
}
"""name -> method, budget, parameters, steps"""
RECALLED_BY_TOKEN = ("clusterkv", "pqcache", "infinigen", "sentencekv", "sentkv")
"""methods that bring some tokens of a span to the device and leave the others in host memory"""
LOOKED_UP = 40
"""spans whose tokens on the device are asked for by the facts of a reason too, which reads the trace for each"""
TOKENS = ROLE["sink"], ROLE["anchor"], ROLE["window"], ROLE["resident"]


@pytest.mark.parametrize("name", RUNS)
def test_a_state_is_that_of_the_slots_while_the_step_attended(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[tuple[int, int], torch.Tensor] = {}
    latest_reads: list[Reads] = []
    plain = Reads.part

    def look(
        reads: Reads, layer: int, selection: Selection | None, part: int = 0
    ) -> tuple[Slots, torch.Tensor | None, Live | None]:
        if latest_reads[-1:] != [reads]:  # another run begins; the first may be the model's own check
            latest_reads.append(reads)
            seen.clear()
        pool = reads.hot.parts[layer][part]
        slots = pool.slots(layer)
        there = torch.isin(slots.role, torch.tensor(TOKENS, dtype=torch.uint8))
        counts = torch.zeros(len(pool.heads), reads.spans.capacity, dtype=torch.long)
        counts.scatter_add_(1, slots.span.long(), there.long())
        table = seen.setdefault((reads.log.step, layer), torch.zeros(reads.hot.shape.kv_heads, reads.spans.capacity))
        table[pool.heads.start : pool.heads.stop] = counts.float()
        return plain(reads, layer, selection, part)

    monkeypatch.setattr(Reads, "part", look)
    method, budget, overrides, new = RUNS[name]
    made = make_prompt("multikey", 400, 0.3, 9_100_001, demo_encode())
    source = PromptText(made.text, made.answer, made.needle, "multikey", 1)
    request = RunRequest(method=method, budget=budget, overrides=overrides, max_new=new, ignore_eos=True)
    uid, _, _ = carry_out(request, source, tmp_path, lambda *_: None, lambda: False)
    told: dict[str, int] = {}
    changed_later = kept_late = 0
    with TraceReader.open(tmp_path, uid) as reader:
        spans = reader.spans().set_index("span")
        length = spans.eval("tok_end - tok_start")
        for (step, layer), table in seen.items():
            for kv_head in range(reader.kv_heads):
                states = reader.span_states(step, layer, kv_head).query("span > 0")
                changed_later += int((states["state"] != states["state_after"]).sum())
                for span, state in states[["span", "state"]].itertuples(index=False):
                    there, whole = int(table[kv_head, span]), int(length[span])
                    told[state] = told.get(state, 0) + 1
                    in_part = 0 < there < whole
                    true = {"cold": there == 0, "evicted": there == 0, "partial": in_part, "partly_recalled": in_part}
                    assert true.get(state, there == whole), (step, layer, kv_head, span, state, there, whole)
                    if state == "partly_recalled" and told[state] <= LOOKED_UP:
                        assert Facts.gather(reader, step, layer, kv_head, span).on_device == there
                    kept_late += int(layer == 0 and state == "resident" and spans["born_step"][span] >= 0)
        listed = reader.head_spans(2, 0, 0)
        now = reader.span_states(2, 0, 0).set_index("span")
        assert listed["state"].tolist() == now["state"].reindex(listed["span"]).tolist()
        assert listed["state_after"].tolist() == now["state_after"].reindex(listed["span"]).tolist()
        changes = reader.state_changes(1, 1)
        for step in range(reader.n_steps):
            last = changes[changes["step"] <= step].drop_duplicates("span", keep="last").set_index("span")["state"]
            assert last.to_dict() == reader.span_states(step, 1, 1).set_index("span")["state"].to_dict()
    if name == "dense":
        assert kept_late, "a page left the window while decoding, and a dense layer has kept it"
    elif name == "whole heads":
        assert told["cold"], "most KV heads give spans away"
        assert told["resident"] > told["cold"] / 4, "which some keep"
    elif name == "freekv":
        assert told["cold"]
        assert changed_later, "heads that were not corrected give up and fetch pages behind their attention"
    elif name in RECALLED_BY_TOKEN:
        assert told["cold"]
        assert told["partly_recalled"]
        one_reason_names_the_part(tmp_path, uid)
    else:
        assert told["partial"]
        assert told["resident"]


def one_reason_names_the_part(runs: Path, uid: str) -> None:
    """A span of which some tokens are on the device has a reason of its own."""
    with TraceReader.open(runs, uid) as reader:
        states = reader.state_changes(reader.n_layers - 1, 0)
        row = states[states["state"] == "partly_recalled"].iloc[0]
        facts = Facts.gather(reader, int(row["step"]), reader.n_layers - 1, 0, int(row["span"]))
        assert facts.state == "partly_recalled"
        dropped_before = reader.meta.method == "sentencekv"
        assert reason(facts).kind == ("partly_evicted" if dropped_before else "partly_recalled")
