"""Settings of the training of SeKV's router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from pydantic import TypeAdapter, ValidationError

from kvlens.refusal import Refusal
from kvlens.text.fieldrules import rule_of


@dataclass(frozen=True)
class SeKVTraining:
    """Defaults are the paper's (sec. 4.1, appendix A) unless marked ours."""

    learning_rate: float = 1e-3
    gate_rate: float = 1.0
    """ours: learning rate of g_phi relative to the rest; at high rates gates saturate while the budget weight is still
    near 0"""
    weight_decay: float = 0.01
    warmup: float = 0.1
    """share of the steps with rising learning rate; a cosine follows"""
    batch: int = 8
    """documents per step"""
    lengths: tuple[int, ...] = (8192, 16384, 32768)
    """length curriculum: an equal share of the steps each (the paper: 8K to 32K)"""
    suffix: int = 128
    """ours: tokens at the end of each document whose positions are trained on, before which its spans lie. The paper's
    distillation uses all positions (app. A) and does not say which spans the first of them see; a larger number comes
    nearer to it, at a cost in memory that grows with it"""
    lambda_zoom: float = 1.0
    lambda_recon: float = 0.5
    lambda_budget: float = 0.1
    """reached after half of the steps, rising from 0"""
    beta: float = 0.1
    w_plus: float = 10.0
    rho: float = 0.9
    concentration: float = 0.5
    """ours: least share of a query's attention on its strongest spans for it to be mined"""
    strongest: int = 4
    """ours: how many spans may share it"""
    budget: float = 0.1
    """ours: share of full KV that caps the anchors of the training documents, as a run's budget does"""
    tau: float = 0.05
    """start of all thresholds"""
    open_gates: float = 2.0
    """ours: bias that every gate of g_phi starts with; sigmoid(2) = 0.88, so that at first components are kept. 0: the
    network's own beginning, half open"""
    clip: float = 1.0
    """ours: largest gradient norm; inf: gradients as they are"""
    exponent: float = 15.0
    """ours: nats by which a resolution that is not in use may exceed the largest score in use (at most 80: float32 ends
    there). Bounds the gradient that the straight-through gate gives it; what the student attends does not depend on
    it"""
    held_out: float = 0.1
    """ours: share of the documents that are only evaluated on"""
    evaluate_every: int = 50
    """ours: steps"""
    evaluate_on: int = 8
    """ours: held-out documents per evaluation"""
    patience: int = 10
    """ours: evaluations without improvement, after the budget weight is whole, that end the training"""
    kept_tokens: int = 0
    """ours: tokens of text that are drawn in all, per length, in kept_tokens / length places; what the model gives for
    them is computed once and kept in memory (about 90 MB each for SmolLM2 at 2,048 tokens in half precision). Steps
    draw from these places. 0: another place at every step, as in the paper"""
    kept_half: bool = True
    """ours: places are kept in 16 bits (float16), singular values and energies in float32"""
    tensor_cores: bool = True
    """ours: on a CUDA device products of float32 numbers are made in TF32, whose numbers have 10 bits after the point
    (the paper trains in bfloat16)"""
    together: int = 8
    """ours: documents that go through the student at once"""
    routing_steps: int = 0
    """ours: steps in which W learns by the zoom loss alone, before the whole objective; 0: none, as in the
    paper. Without steps of the whole objective the router has no gates"""
    routing_windows: int = 64
    """ours: places of text that these steps draw from"""
    routing_suffix: int = 448
    """ours: tokens at the end of a place whose positions they draw from, `suffix` at a time"""
    routing_rate: float = 1e-2
    """ours: their learning rate, falling to 0 in a line"""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "suffix", "strongest", "evaluate_every", "evaluate_on", "together", "routing_windows"):
            if getattr(self, name) < 1:
                raise Refusal(f"{name} must be at least 1.", code="setting_out_of_range", setting=name)
        for name in ("kept_tokens", "routing_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0.")
        tail = max(self.suffix, self.routing_suffix if self.routing_steps else 1)
        if not self.lengths or min(self.lengths) <= tail:
            raise Refusal(
                f"every length must be more than the {tail} tokens at the end that are trained on.",
                code="setting_out_of_range",
                setting="lengths",
            )


def settings_of(mapping: Mapping[str, str]) -> SeKVTraining:
    """Settings by name, as text; of several numbers, with commas. Raises ValueError with one sentence."""
    known_names = {field.name for field in fields(SeKVTraining)}
    if unknown := mapping.keys() - known_names:
        raise ValueError(f"the training has no setting '{min(unknown)}'; it has {', '.join(sorted(known_names))}.")
    values = {name: value.split(",") if name == "lengths" else value for name, value in mapping.items()}
    try:
        return TypeAdapter(SeKVTraining).validate_python(values)
    except ValidationError as error:
        first_error = error.errors()[0]
        if not first_error["loc"]:
            cause = first_error["ctx"]["error"]
            raise Refusal(str(cause), code=getattr(cause, "code", ""), **getattr(cause, "values", {})) from None
        name = str(first_error["loc"][0])
        raise ValueError(f"--train {name}={mapping[name]}: {name} {rule_of(first_error)}.") from None
