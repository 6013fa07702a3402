"""Too little memory, on the device or pinned, or a driver without a feature: one sentence that says what to do, the run
marked failed, its trace readable. Through the command line, in processes of their own; what would fail on a GPU fails
by a fake here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from warmprocess import WarmProcess

from kvlens.store.reader import TraceReader, list_runs

FAKES = {
    "prefill": """
import kvlens.engine.observed as seen
import kvlens.engine.reading as shared
SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
def fails(*arguments): raise torch.OutOfMemoryError(SAYS)
seen.prefill_attention = shared.prefill_attention = fails
""",
    "decode": """
import kvlens.engine.session as seen
count, whole = [0], seen.decode_attention
def fails(*arguments):
    count[0] += 1
    if count[0] > 50: raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return whole(*arguments)
seen.decode_attention = fails
""",
    "host": """
import kvlens.tiers.slots as seen
class Full:
    def __getattr__(self, name): return getattr(torch, name)
    def zeros(self, *shape, **more):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory")
seen.torch = Full()
""",
    "pinned": """
import kvlens.memory.memory as seen
from fakestreams import FakeDevice
device = FakeDevice(eager=True, refused_after=100_000)
seen.link_for = lambda at, ledger: device.link(ledger)
""",
    "no feature": """
import kvlens.engine.session as seen
def fails(*arguments): raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
seen.decode_attention = fails
""",
    "no triton": """
import kvlens.engine.session as seen
def fails(*arguments): raise ModuleNotFoundError("No module named 'triton'", name="triton")
seen.decode_attention = fails
""",
    "device lost": """
import kvlens.engine.session as seen
def fails(*arguments): raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
seen.decode_attention = fails
""",
}
SENTENCES = {
    "prefill": (
        "the device ran out of memory while reading the prompt (CUDA out of memory. Tried to allocate 2.00 GiB.",
        "shorter prompt",
    ),
    "decode": ("the device ran out of memory while decoding (", "take a smaller --budget, --no-coverage"),
    "host": ("the host ran out of memory while placing the prompt; ", "shorter prompt"),
    "pinned": ("pinned host memory could not be had: ", "ulimit -l"),
    "no feature": ("lacks what a kernel needs (CUDA error: no kernel image", "--device cpu"),
    "no triton": ("lacks what a kernel needs (No module named 'triton')", "--device cpu"),
    "device lost": ("the CUDA device failed while decoding (CUDA error: an illegal memory access", "--device cpu"),
}


@pytest.mark.parametrize("what", list(FAKES))
def test_a_shortage_is_one_sentence_and_a_failed_run(warm: WarmProcess, tmp_path: Path, what: str) -> None:
    prompt, runs = tmp_path / "p.txt", tmp_path / "runs"
    prompt.write_text("The river was wide and the bridge was old. The key of Nora is 417. " * 12)
    arguments = ["run", str(prompt), "--method", "freekv", "--budget", "0.5", "--max-new", "60", "--ignore-eos"]
    if what == "decode":  # the first run of a model checks the model, which decodes too
        assert (
            warm.kvlens(tmp_path, "", *arguments, "--max-new", "2", "--runs", str(tmp_path / "first")).returncode == 0
        )
    ended = warm.kvlens(tmp_path, FAKES[what], *arguments, "--runs", str(runs))
    assert ended.returncode == 1, ended.stdout
    lines = ended.stderr.strip().splitlines()
    said = [line for line in lines if line.startswith("kvlens: ")]
    assert len(said) == 1, ended.stderr[-3000:]
    assert "Traceback" not in ended.stderr
    for part in SENTENCES[what]:
        assert part in said[0]
    assert said[0].endswith(".")
    listed = list_runs(runs)
    assert list(listed["status"]) == ["failed"]
    assert SENTENCES[what][1] in listed["error"].iloc[0]
    with TraceReader.open(runs, str(listed["uid"].iloc[0])) as reader:
        steps = reader.steps()
        assert reader.n_steps == len(steps)
        assert (len(steps) > 0) == (what == "decode")
        assert len(reader.events()) > 0 or not len(steps)
