"""What was held, or dropped, beyond what was before; and what is left of it where the opposite is asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvlens.holds import Drop, Hold, Range, joined, without
from kvlens.lens.lines import ranges_in_words
from kvlens.lens.search import Head
from kvlens.meta import RunMeta
from kvlens.metaparts import Held
from kvlens.refusal import Refusal
from kvlens.text.units import counted


def new_holds(holds: Iterable[Held], had: Iterable[Held]) -> tuple[Held, ...]:
    """Of `holds`, the positions that `had` does not hold for the same KV head from that step or an earlier one on,
    whichever spans either names them by."""
    ranges_by_head: dict[Head, list[tuple[Range, int]]] = {}
    for hold in had:
        for head in hold.heads:
            ranges_by_head.setdefault(head, []).append(((hold.tok_start, hold.tok_end), hold.from_step))
    new_holds: list[Held] = []
    for hold in holds:
        groups: dict[tuple[Range, ...], list[Head]] = {}
        whole = hold.tok_start, hold.tok_end
        for head in hold.heads:
            earlier_ranges = (
                token_range for token_range, since in ranges_by_head.get(head, ()) if since <= hold.from_step
            )
            groups.setdefault(without(whole, earlier_ranges), []).append(head)
        for ranges, heads in groups.items():
            for start, end in ranges:
                fields = {"heads": tuple(heads), "tok_start": start, "tok_end": end}
                new_holds.append(hold.model_copy(update=fields | ({} if (start, end) == whole else {"whole": False})))
    return tuple(new_holds)


def count_shared(ranges: Iterable[Held], had: Iterable[Held]) -> int:
    """Positions that `ranges` and `had` name for a same KV head."""
    earlier_holds = tuple(had)
    both = (
        (max(hold.tok_start, earlier.tok_start), min(hold.tok_end, earlier.tok_end))
        for hold in ranges
        for earlier in earlier_holds
        if set(hold.heads) & set(earlier.heads)
    )
    return sum(end - start for start, end in joined((start, end) for start, end in both if start < end))


def describe_kept(holds: Iterable[Held], drops: Iterable[Held], had: RunMeta) -> str:
    """What of holds and drops the run that is repeated had too: '8 tokens held, 12 tokens dropped'; '' for nothing."""
    both = (count_shared(holds, had.hold), "held"), (count_shared(drops, had.drop), "dropped")
    return ", ".join(f"{counted(tokens, 'token')} {verb}" for tokens, verb in both if tokens)


def drop_from_holds(holds: Iterable[Hold], drops: Iterable[Drop]) -> tuple[Hold, ...]:
    """Of holds, those of which `drops` name no token, head by head."""
    named = tuple(drops)
    remaining: list[Hold] = []
    for hold in holds:
        over = [drop for drop in named if drop.tok_start < hold.tok_end and drop.tok_end > hold.tok_start]
        heads = tuple(head for head in hold.heads if not any(head in drop.heads for drop in over))
        if heads:
            remaining.append(replace(hold, heads=heads))
    return tuple(remaining)


def check_steps(requested: Iterable[Hold] | Iterable[Drop], had: Iterable[Hold] | Iterable[Drop]) -> None:
    """Raises ValueError, one sentence, where something asked begins at a later step than the opposite that the run
    has of the same tokens and KV head: `less` takes that away from its first step on, so the steps between would be
    otherwise too."""
    earlier_holds = tuple(had)
    for hold in requested:
        for earlier in earlier_holds:
            start, end = max(hold.tok_start, earlier.tok_start), min(hold.tok_end, earlier.tok_end)
            both = set(hold.heads) & set(earlier.heads)
            if start < end and both and earlier.from_step < hold.from_step:
                layer, kv_head = min(both)
                raise Refusal(
                    f"the run {earlier.verb}s {ranges_in_words(((start, end),))} for layer {layer}, KV head {kv_head} "
                    f"from step {earlier.from_step} on: {hold.verb} from that step on or an earlier one, not from step "
                    f"{hold.from_step}.",
                    code="range_begins_earlier",
                    step=earlier.from_step,
                )
