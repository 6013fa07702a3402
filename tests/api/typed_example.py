"""A typed program on the API, which `make types` reads as strictly as its writer would."""

from __future__ import annotations

import kvlens


def flipped(text: str, answer: str) -> bool | None:
    """Whether holding what was missed most brings the answer back."""
    run = kvlens.run(text, method="snapkv", budget="20%", answer=answer, max_new=12, progress=False)
    lost: kvlens.Verdict = run.verdict
    if lost.span is None:
        return None
    held = run.hold(span=lost.span, layer=lost.layer, kv_head=lost.kv_head)
    seconds: float = float(run.steps()["dur_us"].sum()) / 1e6
    assert seconds > 0
    return held.restored


def outputs(text: str) -> list[str]:
    """Of several methods."""
    race = kvlens.race(text, kvlens.methods("prompt_eviction")["name"].tolist(), budget="20%", max_new=4)
    return [run.output for run in race]


def presets(method: str) -> tuple[str, ...]:
    """Of a method, by its class."""
    return tuple(kvlens.methods.get(method).presets)


def newest() -> kvlens.Run | None:
    """The newest run that lost."""
    listed = kvlens.runs(outcome="lost")
    try:
        return None if listed.empty else kvlens.open(str(listed["uid"][0]))
    except kvlens.KvlensError as error:
        print(error.code, error.values)
        return None
