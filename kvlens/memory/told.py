"""What a memory did, as rows that wait until somebody takes them."""

from __future__ import annotations

from kvlens.memory.evictions import Keeper
from kvlens.memory.ledger import EventLog, Ledger
from kvlens.memory.link import Link
from kvlens.memory.packed_zone import PackedZone
from kvlens.memory.placer import Placer
from kvlens.memory.span_table import SpanTable
from kvlens.rows import CutRow, EventRow, SpanHeadRow, SpanRow, TransferRow


class Told:
    """Each call hands over what came since the last one."""

    def __init__(
        self,
        spans: SpanTable,
        keeper: Keeper,
        placer: Placer,
        packed: PackedZone | None,
        events: EventLog,
        ledger: Ledger,
        link: Link,
    ) -> None:
        self._spans, self._keeper, self._placer, self._packed = spans, keeper, placer, packed
        self._events, self._ledger, self._link = events, ledger, link

    def born(self) -> list[SpanRow]:
        """Spans that there were not before."""
        return self._spans.drain_born()

    def span_heads(self) -> list[SpanHeadRow]:
        """How what went to the cold tier, or was packed, lies there."""
        packed = [] if self._packed is None else self._packed.drain_rows()
        return packed + self._placer.drain()

    def transfers(self, step: int | None = None) -> list[TransferRow]:
        """The finished copies (of one step that is over), with their measured times; see Ledger.drain."""
        self._link.resolve(step)
        return self._ledger.drain(step)

    def events(self) -> list[EventRow]:
        """What happened to spans."""
        return self._events.drain()

    def cuts(self) -> list[CutRow]:
        """Ranks, scores and cuts of what was not kept."""
        return self._keeper.drain_cuts()

    def forget(self) -> None:
        """Nobody wants what the calls above would hand over now: in a run that is not recorded, none of it piles up."""
        for log in (self._events, self._ledger, self._placer):
            log.forget()
        self._keeper.drain_cuts()
        self._spans.drain_born()
        if self._packed is not None:
            self._packed.drain_rows()
