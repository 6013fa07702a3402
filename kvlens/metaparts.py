"""The parts of a run's meta, typed; ``meta.py`` has the whole. None: not recorded."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt

Size = Annotated[StrictInt, Field(ge=0)] | None
"""a count; None: not recorded"""
OBJECT = "object"
"""the origin of a model that a caller loaded and handed in"""


class Stored(BaseModel):
    """A part of the meta: read-only, and as lenient towards keys of other versions as a file must be."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    def to_row(self) -> dict[str, Any]:
        """As the table holds it: what was given, other versions' keys included."""
        return self.model_dump(exclude_unset=True)


class ModelInfo(Stored):
    """The model as it was loaded."""

    name: str | None = None
    architecture: str | None = None
    parameters: Size = None
    step_parameters: Size = None
    """weights that a decode step reads; None: not known, or a mixture of experts"""
    layers: Size = None
    q_heads: Size = None
    kv_heads: Size = None
    head_dim: Size = None
    vocabulary: Size = None
    max_positions: Size = None
    origin: str | None = None
    """OBJECT: a caller loaded the model and handed it in; None: kvlens loaded it by its name"""


class Imported(Stored):
    """Where a run came from that another engine wrote (docs/trace-format.md)."""

    engine: str | None = None
    """name and version of the engine"""
    version: Size = None
    """of the open trace format"""
    tables: tuple[str, ...] = ()
    """tables that the trace had; what the others hold was not recorded"""


class Machine(Stored):
    """Where the run was made, in words that name no host."""

    processor: str | None = None
    cores: Size = None
    system: str | None = None
    threads: Size = None
    """of torch"""


class Sampled(Stored):
    """At which steps and in which layers full attention by span was recorded."""

    every: StrictInt = Field(1, ge=1)
    layers: tuple[StrictInt, ...] = ()
    """empty: all"""
    losses: bool = False
    """lost steps between the chosen ones are recorded too, see kvlens.recording.sampling"""


OBSERVED = "observed"
"""the method of such runs"""


class Observed(Stored):
    """Of a generation that kvlens did not steer (kvlens.observing): what held its keys and how its positions were
    found."""

    cache: str | None = None
    """class of the cache"""
    presses: tuple[str, ...] = ()
    """kvpress presses that were at work"""
    attention: str | None = None
    """the model's attention implementation"""
    shadow_bytes: Size = None
    """of the copy of all keys and values, with the room for more of them; 0: none was kept"""
    entries: dict[str, int] = Field({})
    """attended entries over all steps, layers and KV heads, by how they were matched with the written keys: exact,
    rotated, rewritten, unmatched. ambiguous: those among them of which more equal keys were written than stayed"""
    unmatched_mass: float | None = None
    """attention on entries that match no written key, mean over steps, layers and query heads: the column
    `mass_mean` of head_step"""
    largest_error: float | None = None
    """of a rewritten entry: relative distance from the written key, of an exact key from the written value"""
    windowed_layers: tuple[StrictInt, ...] = ()
    """layers with a sliding window, whose full attention is not recorded"""
    row: StrictInt = 0
    """of the batch"""
    padding: Size = None
    """tokens on the left of the row that are padding"""
    sampled: bool | None = None
    """the caller's generation drew its tokens; False too of a loop that chose the most probable token at each step"""
    stopped: str | None = None
    """why later passes were not followed; None: all were"""
    no_reference: str | None = None
    """why there is no comparison with full KV; None: there is"""
    no_full_attention: str | None = None
    """why coverage, regret and unread are not recorded in any layer; None: they are, beside the windowed layers"""


class Held(Stored):
    """A token range [tok_start, tok_end) that a counterfactual kept exactly for some heads from a step on, or that it
    dropped for them: from that step on they do not attend it."""

    span: int
    tok_start: int
    tok_end: int
    heads: tuple[tuple[int, int], ...]
    """(layer, KV head)"""
    from_step: int
    whole: bool = True
    """False: these are some of the span's tokens"""


class Tested(Stored):
    """One set that a search for the fewest bytes held, or that a search for the fewest bits gave more bits."""

    size: Size = None
    """(layer, KV head, span) in it, or (layer, KV head, K or V)"""
    held_bytes: Size = None
    """of a search for bits: bytes more than the run's codes take"""
    bits: Size = None
    """of a search for bits: of the set's numbers; 0: the model's own format; None: a search for bytes"""
    kl: float | None = None
    """nats, at the step of loss"""
    restored: bool | None = None


class Search(Stored):
    """The search for little that brings the answer back when it is held: few heads, or few bytes."""

    heads: tuple[tuple[int, int], ...] = ()
    """(layer, KV head) found; empty: not even all of them do, or nothing is needed"""
    triples: tuple[tuple[int, int, int], ...] = ()
    """(layer, KV head, span) found; empty: a search for heads, or nothing that was tried brings it back, or nothing
    is needed"""
    tried: Size = None
    """sets that were held"""
    most: Size = None
    """of a search for bytes: sets that it was allowed"""
    ended: bool | None = None
    """of a search for bytes: nothing was left to try; false: it was allowed no more"""
    tests: tuple[Tested, ...] = ()
    """of a search for bytes: every set, in the order in which they were held"""
    kl: float | None = None
    """nats with what was found held: over the answer, of a search for bytes at the step of loss"""
    everywhere: bool | None = None
    """holding all that was asked for brings the answer back"""
    alone: tuple[tuple[int, int, float | None], ...] = ()
    """(layer, KV head, nats over the answer with it alone)"""
    finer: str | None = None
    """of a search for bits: sides found, as the parameter `finer` has them; '': nothing that was tried brings the
    answer back. None: another search"""
    extra_bytes: Size = None
    """of a search for bits: what these sides take more than the run's codes"""
    extra_bits: float | None = None
    """the same in bits per packed number of the whole cache"""
    side_effects: tuple[tuple[int, int, str, float], ...] = ()
    """of a search for bits: (layer as the method numbers it, KV head, K or V, logits that its codes take from the
    answer), most first"""
    needless: bool | None = None
    """nothing was held: what was asked for otherwise brings the answer back by itself"""


class Counterfactual(Stored):
    """What holding or dropping changed against the run that was repeated."""

    step: Size = None
    """the step of loss; None: every step agreed with full KV. Where something was dropped of a run whose answer was
    right: the step at which the repeat left full KV, or, where it never did, the one of its largest KL"""
    kl_before: float | None = None
    """nats, at the step of loss"""
    kl_after: float | None = None
    answer_before: str | None = None
    answer_after: str | None = None
    expected: str | None = None
    expected_from: str | None = None
    """task: the known answer | reference: what full KV says"""
    restored: bool | None = None
    """None: there was nothing to bring back"""
    agrees_after: bool | None = None
    held_bytes: Size = None
    held_tokens: Size = None
    lifted_tokens: Size = None
    """of what was held: what the repeated run had dropped, where the answer is the same with the drop lifted and
    nothing held for it. That costs nothing, and is not in held_bytes and held_tokens. None: nothing of the kind"""
    dropped_tokens: Size = None
    """None: nothing was dropped"""
    stands: bool | None = None
    """with something dropped: the answer, which was right before, is right still; None: it was not, or nothing was"""
    search: Search | None = None

    @property
    def answer_known(self) -> bool:
        """`restored` and `stands` are of an answer; else of full KV's tokens: `restored` of the one at `step`, `stands`
        of all that were compared."""
        return self.expected_from == "task"
