"""Which position each key of a cache belongs to: found by comparison with the keys that were written, never assumed.

Shapes of one layer: H KV heads, n written positions, C entries that attention reads, D head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvlens.observing.written import Written, digests

NOTHING, EXACT, ROTATED, REWRITTEN = range(4)
KINDS = ("nothing", "exact", "rotated", "rewritten")
"""How an entry is the key of its position: not at all; bit for bit; after the rotary embedding is taken back; as the
nearest key, merged, quantised or pruned. An exact key with another value counts as rewritten."""
SAME = 1e-2
"""relative error below which two keys without rotation are the same key"""
MOST_ERROR = 0.5
"""relative error above which the nearest key is no match"""
ROWS = 1024
"""entries compared with all written keys at a time"""
Turn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""takes the rotary embedding of keys [m, D] at positions [m] away"""


Found = tuple[int, int, float, bool]
"""position, kind, error and ambiguous of one entry"""


@dataclass
class Match:
    """position int64 [H, C], -1: none; kind uint8 [H, C]; error float32 [H, C]: relative distance of the key, of an
    exact key that of the value; ambiguous bool [H, C]: more equal keys were written than entries are left, and which of
    them stayed cannot be known."""

    position: torch.Tensor
    kind: torch.Tensor
    error: torch.Tensor
    ambiguous: torch.Tensor

    def spread(self, heads: int) -> Match:
        """Return the match of one head for so many: they share the cache's vectors."""
        parts = self.position, self.kind, self.error, self.ambiguous
        return Match(*(part.expand(heads, -1).clone() for part in parts))


class Matcher:
    """Finds positions in one layer. Entries that equal no written key are searched once and remembered."""

    def __init__(self, written: Written, turn: Turn | None) -> None:
        """turn: takes rotation back; None: the model has none that can be taken back."""
        self._written, self._turn = written, turn
        self._sorted = self._order = torch.empty(0, dtype=torch.int64)
        self._version = -1
        self._repeats = False
        """two positions have the same key"""
        self._remembered: list[dict[int, Found]] = []

    def match(self, keys: torch.Tensor, values: torch.Tensor, live: torch.Tensor) -> Match:
        """Return the positions of the entries [H, C, D]; entries that are not live (bool [H, C]) have none."""
        self._refresh()
        numbers = digests(keys)
        place = torch.searchsorted(self._sorted, numbers).clamp(max=self._sorted.shape[1] - 1)
        ambiguous = torch.zeros_like(live)
        if self._repeats:
            place, ambiguous = self._told_apart(place, numbers, live)
        hit = (self._sorted.gather(1, place) == numbers) & live
        position = torch.where(hit, self._order.gather(1, place), -1)
        error = torch.zeros(numbers.shape, device=keys.device)
        match = Match(position, hit.to(torch.uint8) * EXACT, error, ambiguous & hit)
        self._compare_values(values, hit, match)
        searched = live & ~hit
        if bool(searched.any()):
            self._search(keys, numbers, searched, match)
        return match

    def _refresh(self) -> None:
        if self._version != self._written.version:
            self._sorted, self._order = self._written.digests[0].sort(stable=True)
            self._repeats = bool((self._sorted[:, 1:] == self._sorted[:, :-1]).any())
            self._version = self._written.version

    def _told_apart(
        self, place: torch.Tensor, numbers: torch.Tensor, live: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Equal keys of several positions (a model without rotation) go to these positions in order. Returns (places,
        which entries are ambiguous)."""
        numbers = torch.where(live, numbers, torch.iinfo(torch.int64).max)
        ordered, order = numbers.sort(stable=True)
        rank = torch.arange(ordered.shape[1], device=ordered.device) - torch.searchsorted(ordered, ordered)
        further = (place + torch.empty_like(rank).scatter_(1, order, rank)).clamp(max=self._sorted.shape[1] - 1)
        entries = torch.searchsorted(ordered, numbers, right=True) - torch.searchsorted(ordered, numbers)
        written = torch.searchsorted(self._sorted, numbers, right=True) - torch.searchsorted(self._sorted, numbers)
        return torch.where(self._sorted.gather(1, further) == numbers, further, place), written > entries

    def _compare_values(self, values: torch.Tensor, hit: torch.Tensor, match: Match) -> None:
        """Mark exact keys whose values are not the written ones."""
        at = match.position.clamp(min=0)
        other = hit & (self._written.digests[1].gather(1, at) != digests(values))
        if not bool(other.any()):
            return
        match.kind[other] = REWRITTEN
        if (written := self._written.values) is not None:
            target = written.gather(1, at[..., None].expand(-1, -1, written.shape[-1])).float()
            error = (values.float() - target).norm(dim=-1) / target.norm(dim=-1).clamp(min=1e-12)
            match.error[other] = error[other]

    def _search(self, keys: torch.Tensor, numbers: torch.Tensor, wanted: torch.Tensor, match: Match) -> None:
        """Fill in the entries that equal no written key."""
        self._remembered = self._remembered or [{} for _ in range(len(keys))]
        for head, memory in enumerate(self._remembered):
            places = wanted[head].nonzero()[:, 0]
            names = numbers[head, places].tolist()
            new = [at for at, name in enumerate(names) if name not in memory]
            if new:
                elsewhere = set(match.position[head][match.kind[head] != NOTHING].tolist())
                elsewhere |= {memory[name][0] for name in names if name in memory}
                rows = self._searched(keys[head], head, places[new], elsewhere)
                memory.update(zip([names[at] for at in new], rows, strict=True))
            if not names:
                continue
            position, kind, error, ambiguous = zip(*(memory[name] for name in names), strict=True)
            match.position[head, places] = torch.tensor(position, device=keys.device)
            match.kind[head, places] = torch.tensor(kind, dtype=torch.uint8, device=keys.device)
            match.error[head, places] = torch.tensor(error, device=keys.device)
            match.ambiguous[head, places] = torch.tensor(ambiguous, device=keys.device)

    def _searched(self, keys: torch.Tensor, head: int, places: torch.Tensor, elsewhere: set[int]) -> list[Found]:
        """Return what was found of entries `places` of keys [C, D] of one KV head. elsewhere: positions of its other
        entries."""
        if (whole := self._written.keys) is None:
            return [(-1, NOTHING, 0.0, False)] * len(places)
        written = whole[head].float()
        nearest, error, compared = _nearest(keys[places].float(), written)
        kind = torch.where(compared <= MOST_ERROR, REWRITTEN, NOTHING)
        ambiguous = torch.zeros_like(kind, dtype=torch.bool)
        if self._turn is not None:
            plain = self._turn(keys, torch.arange(len(keys), device=keys.device))
            plain_written = self._turn(written, torch.arange(len(written), device=keys.device))
            turned, turned_error, _ = _nearest(plain[places], plain_written)
            same = (turned_error < SAME) & (turned_error < error)
            turned, repeated, ambiguous = _in_order(plain[places], plain_written, turned, same, elsewhere)
            nearest, error = torch.where(same, turned, nearest), torch.where(same, turned_error, error)
            kind = torch.where(same, torch.where(repeated, REWRITTEN, ROTATED), kind)
        nearest = torch.where(kind == NOTHING, -1, nearest)
        return list(zip(nearest.tolist(), kind.tolist(), error.tolist(), ambiguous.tolist(), strict=True))


def _nearest(keys: torch.Tensor, written: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (the row of written [n, D] nearest to each of keys [u, D], the relative distance, the same in the channels
    that were compared). Channels that are 0 in all keys were pruned: they are not compared."""
    live = (keys != 0).any(0) | (keys == 0).all()
    live_keys, candidates = keys[:, live], written[:, live]
    rows = torch.cat([torch.cdist(part, candidates).argmin(1) for part in live_keys.split(ROWS)])
    compared = _distance(live_keys, candidates[rows])
    return rows, _distance(keys, written[rows]), compared


def _in_order(
    keys: torch.Tensor, written: torch.Tensor, nearest: torch.Tensor, same: torch.Tensor, elsewhere: set[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (positions of keys [u, D] that are the `same` as written ones, whether another entry has the position,
    whether more equal keys were written than are left). Equal tokens have equal keys in the first layer once rotation
    is taken back: they go to their positions in order. elsewhere: positions of other entries, which no key gets."""
    rows, repeated, ambiguous = nearest.tolist(), torch.zeros_like(same), torch.zeros_like(same)
    alike = {
        at: tuple((_distance(written, keys[at].expand_as(written)) < SAME).nonzero()[:, 0].tolist())
        for at in same.nonzero()[:, 0].tolist()
    }
    entries, last, taken = Counter(alike.values()), -1, set(elsewhere)
    for at, places in alike.items():
        open_places = [place for place in places if place not in taken]
        rows[at] = next((place for place in open_places if place > last), (open_places or rows[at : at + 1])[0])
        repeated[at] = rows[at] in taken
        ambiguous[at] = sum(place not in elsewhere for place in places) > entries[places]
        last = rows[at]
        taken.add(last)
    return torch.tensor(rows, device=nearest.device), repeated, ambiguous


def _distance(keys: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (keys - target).norm(dim=1) / target.norm(dim=1).clamp(min=1e-12)
