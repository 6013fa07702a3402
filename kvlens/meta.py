"""What a run says of itself, typed: the meta table of its trace, one key per field, JSON values.

Part of the contract between a run and the trace store, like ``rows.py``; versioned with the schema. None: not recorded.
Keys that this kvlens does not know are kept as they are. Sizes are bytes, `_s` seconds, `_us` microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, StrictInt, model_validator

from kvlens.metaparts import Counterfactual, Held, Imported, Machine, ModelInfo, Observed, Sampled, Size, Stored


class Outcome(Stored):
    """What is known when a run has ended."""

    output_text: str | None = None
    stopped: str | None = None
    """why it ended"""
    prefill_s: float | None = None
    """None too where the prompt was kept from an earlier run"""
    second_tokens: Size = None
    """that went through the model once more before the prompt was placed, for a method that reads it twice; None: it
    reads it once"""
    second_s: float | None = None
    """of that second reading; it is part of `prefill_s` where that is there"""
    load_s: float | None = None
    """of loading the model and checking it, before the first run of the process; None: a caller handed it in"""
    prompt_kept: bool | None = None
    """whether the prompt had been read by an earlier run, and its keys and values kept"""
    decode_s: float | None = None
    surprisal_s: float | None = None
    """of the surprisals of the prompt's tokens, computed after the last step; None: they were known before the first"""
    no_surprisal: str | None = None
    """of a run that came to its end: why they are not there; None: they are"""
    process_peak_bytes: Size = None
    unannounced_bytes: Size = None
    """device bytes that the method held without announcing them, at most; resident bytes count them from the step on at
    which they were found. None too in traces from before this was recorded"""
    kernels: str | None = None
    """what attention ran on; before the end: what it may run on"""
    link_host_wait_s: float | None = None
    """how long the host waited for the link"""
    whatif: Counterfactual | None = None
    no_effects: str | None = None
    """of a run that left full KV, came to its end and was recorded at level 'spans': why there are no effects on the
    choices at lost steps; None: there are"""
    effect_steps: tuple[StrictInt, ...] = ()
    """lost steps, on full KV's tokens, over which the stored effects are added; empty: they are of the step of loss
    alone, as in traces before there was the choice, or there are none"""
    effect_order: tuple[tuple[StrictInt, StrictInt, StrictInt], ...] = ()
    """(layer, KV head, span), most important first, as kvlens.engine.ranking orders them; empty: by effect"""
    effect_s: float | None = None
    """of the effects, after the run's last step; None: none were computed, or the run was one of a race"""
    full_kv_s: float | None = None
    """spent on full KV beside the run, for its own masses; no part of `decode_s`. None: they were not recorded"""
    no_reference_masses: str | None = None
    """of a run with a reference and full attention by span: why full KV's own masses are not there, or not of all
    steps; None: they are"""
    raced: Size = None
    """methods that decoded in turns with it in one process: copies go on while the others have their turn, so waits for
    them come out short, and the process's peak is that of all"""
    batched: Size = None
    """prompts whose steps were computed together with its steps, at most; a step's time is that of all, and the
    process's peak too. None: it decoded alone"""


class RunMeta(Outcome):
    """The whole of it. Sizes that every reader needs are required; anything else a trace may lack."""

    # the file
    schema_version: Size = None
    run_uid: str | None = None
    created: str | None = None
    trace_level: Literal["summary", "heads", "spans"] = "spans"
    mass_codec: str | None = None
    oracle_codec: str | None = None
    recovered: bool | None = None
    left_out: tuple[str, ...] = ()
    """tables whose rows stayed behind when the run was handed on, see kvlens.app.gallery.bundle"""
    trace_stalls: Size = None
    """how often the engine waited for the disk"""
    imported: Imported | None = None
    """of a trace that another engine wrote; None: kvlens carried out the run"""
    # versions and machine
    kvlens: str | None = None
    torch: str | None = None
    transformers: str | None = None
    machine: Machine | None = None
    device: str | None = None
    dtype: str | None = None
    link: str | None = None
    started: str | None = None
    # the model
    model: str | None = None
    model_info: ModelInfo | None = None
    model_fingerprint: str | None = None
    model_check: dict[str, Any] | None = None
    """whether full KV equals the model's own generate (kvlens.runs.modelcheck): verdict, tokens, border, compared,
    reason, seconds"""
    layers: StrictInt = Field(ge=1, le=256)
    q_heads: StrictInt = Field(ge=1, le=256)
    kv_heads: StrictInt = Field(ge=1, le=256)
    head_dim: Size = None
    token_bytes: Size = None
    """of one token's keys and values, all layers"""
    full_kv_bytes: Size = None
    windows: tuple[StrictInt, ...] = ()
    """per layer the tokens of its sliding window, 0: the layer has none; empty: no window is shorter than the run. A
    layer with a window keeps it, and the method acts on the others. Where every layer has one the method acts on all,
    and tokens older than the window are attended by none"""
    # the method
    method: str | None = None
    preset: str | None = None
    fit: str | None = None
    """under the preset `fit`: why it was run and what it came to"""
    config: dict[str, Any] = Field({})
    """the method's parameters"""
    stand_in: str | None = None
    """what of the method is an untrained or uncalibrated stand-in under these parameters; None: nothing"""
    own_decisions: dict[str, Any] = Field({})
    """of these, what the paper leaves open"""
    budget: str | None = None
    """as asked for"""
    budget_bytes: Size = None
    """None: no limit"""
    # the prompt and how tokens are chosen
    prompt_tokens: Size = None
    prompt_text: str | None = None
    """until it is written to prompt.txt"""
    prompt_sha256: str | None = None
    task: str | None = None
    answer: str | None = None
    answers: tuple[str, ...] = ()
    """other answers that are right as well as `answer`"""
    answer_rule: str | None = None
    """by which an output is judged: `contains` (kvlens.tasks.answers), or that of a task"""
    answer_prefix: str | None = None
    """words that the answer begins with, fed behind the prompt"""
    question: Literal["in", "after"] | None = None
    """in: read and placed with the context; after: fed step by step once the context was placed; None: a trace from
    before there was the choice, in"""
    question_start: Size = None
    """the character of the prompt with which the question begins"""
    question_tokens: Size = None
    """so many steps from step 0 on choose nothing: their tokens are the question's"""
    chat: dict[str, Any] | None = None
    """the chat form that was fed: template, sha256, system, before, after, trims; None: the text as it is"""
    stop_ids: tuple[int, ...] = ()
    """token ids that end the output"""
    generation_rules: dict[str, Any] = Field({})
    """rules of the model's generation_config that were applied to the logits, as greedy `generate` applies them"""
    needle: tuple[tuple[int, int], ...] = ()
    """character ranges [start, end) of the prompt"""
    segments: tuple[tuple[str, StrictInt, StrictInt], ...] = ()
    """named parts of what was fed, in tokens [start, end); a name may have several. Empty: there are none"""
    segment_ranges: tuple[tuple[str, StrictInt, StrictInt], ...] = ()
    """of these, the parts of the prompt that a person named, in characters [start, end)"""
    observed: Observed | None = None
    """of a generation that kvlens did not steer; None: a run of kvlens"""
    max_new: Size = None
    seed: StrictInt | None = None
    temperature: float | None = None
    top_p: float | None = None
    forced: bool | None = None
    """fed another run's tokens"""
    coverage: bool | None = None
    oracle: Sampled | None = None
    request: dict[str, Any] | None = None
    """see kvlens.runs.request"""
    # other runs
    reference: str | None = None
    """uid of the full-KV run it is compared with"""
    reference_output: str | None = None
    """what that run answered; None too in traces from before this was recorded"""
    reference_key: str | None = None
    parent: str | None = None
    """uid of the run it repeats"""
    hold: tuple[Held, ...] = ()
    drop: tuple[Held, ...] = ()
    changed: dict[str, str] = Field({})
    """what was asked for otherwise than of the run it repeats: the budget, or parameters, each as it was given"""
    # when prefill has ended
    prefill_us: Size = None
    prefill_peak_bytes: Size = None
    prefill_cold_bytes: Size = None
    prefill_resident_bytes: Size = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_recorded(cls, given: Any) -> Any:
        """A key whose value is null says no more than no key at all."""
        if not isinstance(given, dict):
            return given
        empty = {name for name, field in cls.model_fields.items() if field.default is not None}
        return {key: value for key, value in given.items() if value is not None or key not in empty}

    @model_validator(mode="after")
    def _heads_make_groups(self) -> RunMeta:
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads do not make groups of {self.kv_heads} KV heads")
        return self

    @property
    def is_steered(self) -> bool:
        """Return True if kvlens carried out the run and can repeat it: the run was neither imported nor observed."""
        return self.imported is None and self.observed is None

    def lacks(self, table: str) -> bool:
        """Return True if a table was not recorded: its rows stayed behind, another engine did not write it, or an
        observed cache moved its own bytes."""
        written = None if self.imported is None else self.imported.tables
        unseen = self.observed is not None and table == "transfer"
        return unseen or table in self.left_out or (written is not None and table not in written)

    @property
    def sampled(self) -> Sampled | None:
        """Which of full attention's masses the trace has; None where they were not recorded, or stayed behind when the
        run was handed on."""
        return None if "oracle" in self.left_out else self.oracle

    @property
    def interfered(self) -> bool:
        """A counterfactual held or dropped something in it, so it says nothing of its method alone."""
        return bool(self.hold or self.drop)

    @property
    def asked_steps(self) -> int:
        """Steps whose tokens are the question's, none of the answer's."""
        return self.question_tokens or 0

    @property
    def asked_new(self) -> int | None:
        """New tokens at most, as asked for: without the steps that feed a question, which `max_new` counts."""
        return None if self.max_new is None else self.max_new - self.asked_steps

    def pick(self, names: Sequence[str]) -> dict[str, Any]:
        """Some fields by name, plain values."""
        values = self.model_dump(include=set(names), exclude_unset=True)
        return {name: values.get(name) for name in names}
