"""The whole KV side of a run on a device that is not there (tests/fakecuda.py): slots, tables, summaries, selections,
records claim CUDA, the cold tier is host memory behind the CUDA link. Whatever mixes the two without a copy is refused
as a GPU would refuse it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fakecuda import CUDA, FakeCuda, on_cuda, on_host
from fakestreams import FakeDevice
from support import ListSink, Prompts, makes, preset_of, run, share_of

from kvlens.engine.engine import Engine
from kvlens.engine.session import Session
from kvlens.kernels import attend
from kvlens.link.cuda_link import CudaLink
from kvlens.recording.recorder import Recorder

NEW = 4


def test_the_device_refuses_what_a_gpu_refuses() -> None:
    with FakeCuda():
        there, here = torch.zeros(3, device=CUDA), torch.ones(3)
        assert there.device.type == (there + 1).device.type == (there + there).device.type == "cuda"
        assert there.is_cuda
        assert not here.is_cuda
        assert torch.equal((there + torch.tensor(2.0)).cpu(), torch.full((3,), 2.0)), "numbers may come from the host"
        there.copy_(here)
        assert there.sum().item() == 3
        assert there[torch.tensor([0, 2])].is_cuda
        assert not there.cpu().is_cuda
        for mixed in (
            lambda: there + here,
            lambda: torch.cat((there, here)),
            lambda: here[torch.zeros(1, dtype=torch.long, device=CUDA)],
            lambda: there.index_select(0, torch.tensor([1])),
            lambda: there.__setitem__(torch.tensor([1, 0]), torch.ones(2)),
            lambda: torch.where(there > 0, here, 0.0),
        ):
            with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
                mixed()
        with pytest.raises(TypeError, match="can't convert cuda"):
            there.numpy()
        assert there.numpy(force=True).sum() == 3


class Turned:
    """The model's rotary embedding lies where the model does."""

    def __init__(self, rotate: Any) -> None:
        self._rotate, self.used = rotate, rotate.used

    def __call__(self, keys: torch.Tensor, positions: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        assert keys.is_cuda
        assert positions.is_cuda
        return on_cuda(self._rotate(on_host(keys), on_host(positions), *more, **named))


def module_to(self: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Stands for Module.to(cuda), which takes real devices only."""
    for module in self.modules():
        for name, weight in list(module._parameters.items()):
            del module._parameters[name]
            setattr(module, name, None if weight is None else on_cuda(weight.data))
    return self


CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in makes()]
CASES += [
    ("sekv", {"router": "pca", "form": "raw"}),
    ("sekv", {"router": "pca", "pre_rope": True}),
    ("sekv", {"router": "mean", "whole_share": 0.5, "coarse": False}),
    ("freekv", {"tau": 1.0}),
]


@pytest.mark.parametrize(
    ("name", "overrides"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_no_method_mixes_devices(
    demo: Any, prompts: Prompts, name: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompts.task("multikey", 512)
    settings = {
        "budget": share_of(name, "0.3"),
        "preset": preset_of(name),
        "max_new": NEW,
        "keep_logits": True,
        "ignore_eos": True,
        "coverage": True,
        "overrides": overrides,
    }
    host, there = ListSink(), ListSink()
    plain = run(demo, prompt, name, sink=host, read=prompts.read(prompt, name), **settings)

    links: list[CudaLink] = []

    def link_for(device: torch.device, ledger: Any) -> CudaLink:
        assert device.type == "cuda"
        links.append(FakeDevice(seed=3, eager=True).link(ledger))
        return links[-1]

    context, write, attended, ahead, finish, work = (
        Engine.context,
        Session.write,
        Session.attend,
        Session.look_ahead,
        Session.finish_prefill,
        Recorder._work,
    )

    def on_device(self: Engine, *arguments: Any) -> Any:
        made = context(self, *arguments)
        return replace(made, device=CUDA, rotate=None if made.rotate is None else Turned(made.rotate))

    def measuring(self: Recorder) -> None:
        with FakeCuda():
            work(self)

    monkeypatch.setattr("kvlens.memory.memory.link_for", link_for)
    monkeypatch.setattr(attend, "backend", lambda tensor: "torch")
    monkeypatch.setattr(Engine, "context", on_device)
    monkeypatch.setattr(Session, "write", lambda self, layer, *kv: write(self, layer, *(on_cuda(x) for x in kv)))
    monkeypatch.setattr(
        Session, "attend", lambda self, layer, q, scaling: on_host(attended(self, layer, on_cuda(q), scaling))
    )
    monkeypatch.setattr(Session, "look_ahead", lambda self, layer, q: ahead(self, layer, on_cuda(q)))
    monkeypatch.setattr(
        Session,
        "finish_prefill",
        lambda self, surprisal: finish(self, None if surprisal is None else on_cuda(surprisal)),
    )
    monkeypatch.setattr(Recorder, "_work", measuring)
    monkeypatch.setattr(torch.nn.Module, "to", module_to)
    with FakeCuda():
        other = run(demo, prompt, name, sink=there, **settings)
    assert there.prefilled is not None
    copied = bool(there.prefilled.transfers) or any(record.transfers for record in there.steps)
    assert copied <= len(links) <= 1, "a run whose tokens stay on the device needs no link"
    assert other.ids == plain.ids
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, other.logits, strict=True))
    assert all(check.passed for check in other.checks)
    assert [len(record.transfers) for record in there.steps] == [len(record.transfers) for record in host.steps]
