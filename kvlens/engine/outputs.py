"""What each hook must return: shapes, types, ranges. Every function raises MethodFault that names the hook.

Shapes: L layers, Hq query heads, H_kv KV heads, G = Hq / H_kv, D head size, S span ids, W wishes, n prompt tokens that
prefill covered.
"""

from __future__ import annotations

from itertools import pairwise
from numbers import Integral
from typing import Any

import torch

from kvlens.memory.placement import Placement, Selection
from kvlens.methods.faults import HookChecks
from kvlens.methods.hooks import BagChange, WindowLeave
from kvlens.methods.run_inputs import Reading, RunContext
from kvlens.rows import CAUSES, METHOD_HEAD_COLUMNS, METHOD_KV_COLUMNS, ROLES, SPAN_STATES
from kvlens.shape import KVShape
from kvlens.tiers.layout import Layout


def block(checks: HookChecks, answer: Any) -> int:
    """Return the chunk size if it is one."""
    if not isinstance(answer, int) or answer < 0:
        raise checks.fault("block", "returned no number of tokens", "an integer from 0 on", repr(answer))
    return answer


def reading(checks: HookChecks, answer: Any, layer: int, shape: KVShape, tokens: int, read: int) -> Reading | None:
    """Check the attention of the last `tokens` of the `read` prompt tokens."""
    if answer is None:
        return None
    if not isinstance(answer, Reading):
        raise checks.fault("reading", "returned no Reading", "Reading or None", type(answer).__name__, layer)
    sizes = ((shape.kv_heads, tokens, read), (1, tokens, read))
    checks.tensor("reading", answer.seen, sizes, "bool", layer)
    if answer.nearer is not None:
        checks.tensor("reading", answer.nearer, ((tokens,),), "int", layer)
    return answer


def placed(checks: HookChecks, answer: Any, context: RunContext) -> tuple[Layout, Placement]:
    """Check the answer of `prefill_end`."""
    hook = "prefill_end"
    if not (
        isinstance(answer, tuple)
        and len(answer) == 2
        and isinstance(answer[0], Layout)
        and isinstance(answer[1], Placement)
    ):
        raise checks.fault(hook, "returned no layout and placement", "(Layout, Placement)", type(answer).__name__)
    layout, placement = answer
    n, shape, limit = context.prompt_tokens, context.shape, context.budget_bytes
    if not 0 <= layout.window_from <= n:
        raise checks.fault(hook, "begins the window outside the prompt", f"0 to {n}", str(layout.window_from))
    size = layout.bytes(shape)
    if limit is not None and size > limit:
        raise checks.fault(hook, "lays out more than the budget", f"at most {limit:,} bytes", f"{size:,} bytes")
    _placement(checks, hook, placement, 0, layout.window_from, shape)
    if not layout.bag and layout.quantised is None:
        _room(checks, hook, placement, layout, shape)
    return layout, placement


def _room(checks: HookChecks, hook: str, placement: Placement, layout: Layout, shape: KVShape) -> None:
    """The kept zone of every KV head holds its kept tokens."""
    counts = (placement.kept.positions >= 0).sum(-1).expand(shape.layers, shape.kv_heads).tolist()
    for layer, heads in enumerate(counts):
        for head, count in enumerate(heads):
            zone = layout.zones_of(layer, head).kept
            if count > zone and not layout.dense_at(layer, head):
                expected, actual = f"at most {zone} tokens", f"{count} of KV head {head}"
                raise checks.fault(hook, "keeps more tokens than its kept zone holds", expected, actual, layer)


def _placement(checks: HookChecks, hook: str, placement: Placement, start: int, end: int, shape: KVShape) -> None:
    """Check where the positions [first, end) go."""
    spans, count = placement.spans, len(placement.spans)
    edges = sorted((span.tok_start, span.tok_end) for span in spans)
    covered = (edges[0][0], edges[-1][1]) if edges else (start, start)
    if covered != (start, end) or any(previous[1] != right[0] for previous, right in pairwise(edges)):
        expected = f"every position from {start} to {end} in one span"
        raise checks.fault(hook, "cuts spans with gaps or overlaps", expected, f"{count} spans, {covered}")
    for name, words, allowed in (("states", placement.states, SPAN_STATES), ("roles", placement.roles, ROLES)):
        strange = next((word for word in words if word not in allowed), None)
        if len(words) != count or strange is not None:
            expected = f"{count} of {', '.join(allowed)}"
            actual = f"{len(words)} {name}" if strange is None else repr(strange)
            raise checks.fault(hook, f"returned wrong {name} of spans", expected, actual)
    for name in ("coarse", "offload", "selectable"):
        wrong = [index for index in getattr(placement, name) if not 0 <= index < count]
        if wrong:
            raise checks.fault(hook, f"names {name} spans that it did not cut", f"0 to {count - 1}", str(wrong[0]))
    positions, sizes = placement.kept.positions, _spread(shape, "tokens")
    _range(checks, hook, checks.tensor(hook, positions, sizes, "int"), "kept positions", -1, end)
    if placement.kept.score is not None:
        checks.tensor(hook, placement.kept.score, sizes)
    for entries in (placement.coarse_keys, placement.coarse_values):
        if entries is not None:
            checks.finite(hook, entries, (shape.layers, shape.kv_heads, "entries", shape.head_dim))


def _spread(shape: KVShape, last: str) -> tuple[tuple[int | str, ...], ...]:
    """Sizes of a table that speaks for every layer and KV head, or for all layers or KV heads alike."""
    return tuple((layers, heads, last) for layers in (shape.layers, 1) for heads in (shape.kv_heads, 1))


def selection(checks: HookChecks, answer: Any, layer: int, shape: KVShape, spans: int, position: int) -> None:
    """Check the answer of `select` that is not None. spans: S; position: of the step's token."""
    hook, heads = "select", shape.kv_heads
    if not isinstance(answer, Selection):
        raise checks.fault(hook, "returned no Selection", "Selection or None", type(answer).__name__, layer)
    table = ((heads, shape.group, spans),)
    checks.tensor(hook, answer.fine, table, "bool", layer)
    checks.tensor(hook, answer.requested, ((heads, "wishes"),), "int", layer)
    _range(checks, hook, answer.requested, "requested spans", -1, spans, layer)
    if answer.rows is not None:
        checks.tensor(hook, answer.rows, ((heads, "wishes"),), "int", layer)
        _range(checks, hook, answer.rows, "requested positions", -1, position, layer)
    if answer.tokens is not None:
        checks.tensor(hook, answer.tokens, table, "int", layer)
    if answer.positions is not None:
        checks.tensor(hook, answer.positions, ((heads, shape.group, "positions"),), "bool", layer)
    if answer.entries is not None:
        sizes = (heads, shape.group, "entries"), (heads, 1, "entries")
        checks.tensor(hook, answer.entries, sizes, "bool", layer)
    if answer.members is not None:
        checks.tensor(hook, answer.members, ((heads, "positions"),), "int", layer)
    if answer.now is not None:
        checks.tensor(hook, answer.now, ((heads,),), "bool", layer)
    if answer.score is not None:
        checks.tensor(hook, answer.score, ((heads, spans),), layer=layer)
    if answer.blend is not None:
        checks.finite(hook, answer.blend.share, (heads, shape.group), layer=layer)
        checks.share(hook, answer.blend.share, "share of the output", layer)
        checks.finite(hook, answer.blend.value, (heads, shape.head_dim), layer=layer)
    if not isinstance(answer.index_bytes, Integral) or answer.index_bytes < 0:
        raise checks.fault(hook, "returned no number of index bytes", "0 or more", repr(answer.index_bytes), layer)
    for cause in (answer.cause, answer.later_cause):
        if cause not in CAUSES:
            raise checks.fault(hook, "names an unknown cause", " or ".join(CAUSES), repr(cause), layer)
    for columns, columns_known, size in (
        (answer.head_columns, METHOD_HEAD_COLUMNS, shape.q_heads),
        (answer.kv_columns, METHOD_KV_COLUMNS, heads),
    ):
        for name, values in columns.items():
            if name not in columns_known:
                raise checks.fault(hook, "fills an unknown column", " or ".join(columns_known), repr(name), layer)
            checks.tensor(hook, values, ((size,),), "float or int or bool", layer)


def change(checks: HookChecks, answer: Any, shape: KVShape, places: int, position: int, window_start: int) -> None:
    """Check the answer of `decode_end` that is not None. places: of the largest bag; position: of the step's token."""
    hook = "decode_end"
    if isinstance(answer, WindowLeave):
        if answer.start != window_start or not answer.start < answer.end <= position + 1:
            expected = f"from {window_start} to at most {position + 1}"
            actual = f"{answer.start} to {answer.end}"
            raise checks.fault(hook, "lets tokens leave that do not begin the window", expected, actual)
        _placement(checks, hook, answer.placement, answer.start, answer.end, shape)
        return
    if not isinstance(answer, BagChange):
        raise checks.fault(hook, "returned no change", "WindowLeave, BagChange or None", type(answer).__name__)
    if answer.evicted is not None:
        size = ((shape.layers, shape.kv_heads),)
        _range(checks, hook, checks.tensor(hook, answer.evicted.places, size, "int"), "places in the bag", -1, places)
        for figures in (answer.evicted.score, answer.evicted.cut):
            if figures is not None:
                checks.tensor(hook, figures, size)
    if answer.opened is not None and answer.opened.spans:
        spans = answer.opened.spans
        _placement(checks, hook, answer.opened, spans[0].tok_start, spans[-1].tok_end, shape)


def held(checks: HookChecks, answer: Any) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return the tensors that a method holds, by name."""
    if not isinstance(answer, dict) or not all(
        isinstance(part, torch.Tensor) for parts in answer.values() for part in parts
    ):
        raise checks.fault("held", "returned no tensors by name", "dict of tuples of tensors", type(answer).__name__)
    return answer


def _range(
    checks: HookChecks, hook: str, table: torch.Tensor, noun: str, least: int, end: int, layer: int | None = None
) -> None:
    """Refuse an index below `least` or from `end` on."""
    if table.numel():
        checks.within(hook, table, noun, least, end, layer)
