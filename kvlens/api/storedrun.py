"""A stored run: its verdict, its tables, its replay, and repeats of it with something changed."""

from __future__ import annotations

import html
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.api.asking import BudgetLike, budget_text, one_budget, parameters_of
from kvlens.api.carrying import carrying, check_end
from kvlens.api.errors import RequestError, translated
from kvlens.api.keywordtypes import check_numbers
from kvlens.api.models import Given, Named
from kvlens.api.pieces import Triple, pieces_of
from kvlens.api.recorded import RecordedRun
from kvlens.methods.naming import code_name

if TYPE_CHECKING:
    from kvlens.ledger.account import LossLedger
    from kvlens.lens.tipping import Tip
    from kvlens.lens.trial_request import TrialRequest
    from kvlens.metaparts import Counterfactual

FRAME_HEIGHT = 760
"""pixels of the replay in a notebook"""


class Run(RecordedRun):
    """A stored run. `run`, `open` and the methods that repeat a run return one.

    In a notebook a Run shows its replay; elsewhere `repr` is one line.
    """

    def __init__(self, folder: Path, uid: str, models: Named | Given, progress: bool = True) -> None:
        """models: where repeats of the run have their model from; progress: repeats show bars unless they are told."""
        super().__init__(folder, uid)
        self._models, self._progress = models, progress

    # ---- repeats with something changed
    @property
    def whatif(self) -> Counterfactual | None:
        """Of a repeat: what the change did, with figures (kvlens.metaparts.Counterfactual); None: the run repeats
        none."""
        return self.meta.whatif

    @property
    def restored(self) -> bool | None:
        """Of a repeat: the answer is back. None: nothing was lost before, or the run repeats none."""
        return None if self.whatif is None else self.whatif.restored

    @property
    def stands(self) -> bool | None:
        """Of a repeat with something dropped: the right answer stands without it. None: any other run."""
        return None if self.whatif is None else self.whatif.stands

    def hold(
        self,
        span: int | None = None,
        layer: int | None = None,
        kv_head: int | None = None,
        *,
        triples: Sequence[Triple] = (),
        tokens: tuple[int, int] | None = None,
        from_step: int = 0,
        segment: str | None = None,
        progress: bool | None = None,
    ) -> Run:
        """Repeat the run with a span held exactly on the device, and return the repeat.

        Args:
            span: id of the span (`run.spans()`).
            layer, kv_head: for which KV head; None: all of them.
            triples: (layer, KV head, span) to hold, in place of span or beside it.
            tokens: positions (first, last) to hold in place of a span.
            segment: name of a part of the prompt (`run.segments()`) to hold in place of a span.
            from_step: first step at which it is held.
            progress: show bars; None: as the run was made or opened.
        """
        pieces = pieces_of(span, layer, kv_head, triples, tokens, self._ranges(segment))
        return self._repeat(progress, pieces=pieces, from_step=from_step)

    def drop(
        self,
        span: int | None = None,
        layer: int | None = None,
        kv_head: int | None = None,
        *,
        triples: Sequence[Triple] = (),
        tokens: tuple[int, int] | None = None,
        from_step: int = 0,
        segment: str | None = None,
        progress: bool | None = None,
    ) -> Run:
        """Repeat the run with a span attended by no head, or not by the named one, and return the repeat. Arguments:
        as for `hold`."""
        pieces = pieces_of(span, layer, kv_head, triples, tokens, self._ranges(segment))
        return self._repeat(progress, drops=pieces, from_step=from_step)

    def at(
        self,
        budget: BudgetLike = None,
        *,
        budget_tokens: int | None = None,
        budget_bytes: int | None = None,
        progress: bool | None = None,
        **parameters: Any,
    ) -> Run:
        """Repeat the run with another budget or other parameters of its method, and return the repeat."""
        from kvlens.runs.repeat import check_steered

        with translated():
            check_steered(self.uid, self.meta)
            changed = parameters_of(str(self.meta.method), parameters, ("budget",))
            limit = budget_text(one_budget(budget, budget_tokens, budget_bytes))
        values = {name: str(value) for name, value in changed.items()} | ({} if limit is None else {"budget": limit})
        if not values:
            raise RequestError("nothing_changed", "say what to change: pass budget= or a parameter of the method.")
        return self._repeat(progress, changed=values)

    def fair(self, *, progress: bool | None = None) -> Run:
        """Repeat the run with its budget divided over the segments of the prompt: each keeps the same share of its
        tokens. Return the repeat; its `segments()` beside this run's show the shares. Raise RequestError `no_segments`,
        or `composition_senseless` for a method without scores to divide."""
        from kvlens.lens.fair import fair_change
        from kvlens.runs.repeat import check_steered

        with translated():
            check_steered(self.uid, self.meta)
            change = fair_change(self.meta)
        return self._repeat(progress, changed=change)

    def fewest_bytes(self, most: int = 40, *, progress: bool | None = None) -> Run:
        """Search for the (layer, KV head, span) that restore the answer with the fewest bytes, and return the run that
        holds them; its `held` lists them. most: sets to try."""
        check_numbers("a whole number from 1 on", most=most)
        return self._repeat(progress, fewest=most)

    def fewest_bits(self, most: int = 40, *, progress: bool | None = None) -> Run:
        """Search for the keys or values of KV heads of a quantised run whose better storage restores the answer with
        the fewest extra bits, and return the run that stores them so. Its `whatif.search` has `finer`, the sides found,
        and `side_effects`, what the codes of each side cost. most: sets to try."""
        check_numbers("a whole number from 1 on", most=most)
        return self._repeat(progress, bits=most)

    def tips(
        self,
        parameter: str | None = None,
        low: float | None = None,
        high: float | None = None,
        *,
        resolution: float | None = None,
        most: int = 12,
        progress: bool | None = None,
    ) -> Tip:
        """Search for the budget, or the value of a parameter, at which this run's answer tips. Return what was found:
        `sentence`, `state`, the neighbours `lost` and `right`, and all `probes`; `kvlens.open(probe.uid)` is the run.

        Args:
            parameter: of the method, with its two ends; None: the budget in percent of full KV.
            low, high: the ends; None: the run's own value, and the farthest budget that the method can keep to.
            resolution: the distance of a lost and a right value that is near enough.
            most: values to try.
            progress: show bars; None: as the run was made or opened.
        """
        from kvlens.lens.tips import tips

        check_numbers("a number", low=low, high=high, resolution=resolution, most=most)
        shown = self._progress if progress is None else progress
        with carrying(self._models, shown) as job:
            bars, ends = job.progress, (parameter, low, high, resolution, most)
            return tips(self.folder, self.uid, bars.report, job.cancelled, bars.say, self._models, *ends)

    def ledger(self, *, again: bool = False, progress: bool | None = None) -> LossLedger:
        """Split the lead that the run lost into causes that add up, by repeats of the run in memory; the ledger is kept
        beside the run, and where that fails, a UserWarning says why. again: measure anew what is kept. Raise for a run
        that lost nothing."""
        from kvlens.ledger.ofrun import measure_ledger
        from kvlens.ledger.storage import stored_ledger

        pair = None if again else stored_ledger(self.folder, self.uid)
        if pair is None:
            unstored: list[str] = []
            with carrying(self._models, self._progress if progress is None else progress) as job:
                context = job.progress.report, job.cancelled, self._models
                pair = measure_ledger(self.folder, self.uid, *context, say=unstored.append)
            for sentence in unstored:
                warnings.warn(sentence, stacklevel=2)
        return pair[0]

    def _ranges(self, segment: str | None) -> tuple[tuple[int, int], ...]:
        """Return a segment's token ranges. Raises RequestError, `unknown_segment`."""
        from kvlens.lens.segments import segment_ranges

        with translated():
            return () if segment is None else segment_ranges(self.reader, segment)

    @property
    def held(self) -> tuple[Triple, ...]:
        """(layer, KV head, span) that the run held."""
        return tuple((layer, head, hold.span) for hold in self.meta.hold for layer, head in hold.heads)

    def _repeat(self, progress: bool | None, **changes: Any) -> Run:
        from kvlens.lens.trial_request import TrialRequest
        from kvlens.lens.whatif import whatif

        shown = self._progress if progress is None else progress
        with carrying(self._models, shown) as job:
            change: TrialRequest = TrialRequest(**changes)
            bars = job.progress
            stored, _ = whatif(self.folder, self.uid, change, bars.report, job.cancelled, bars.say, self._models)
        repeat = Run(self.folder, stored.uid, self._models, shown)
        check_end(repeat.reader, stored.status)
        return repeat

    # ---- what it looks like
    def save_html(self, path: str | Path) -> Path:
        """Write the replay as one HTML file that needs no other, and return its path."""
        from kvlens.player.page import player_html

        target = Path(path)
        with translated():
            page = player_html(self.reader)
        try:
            target.write_text(page, encoding="utf-8")
        except OSError as error:
            sentence = f"'{target}' cannot be written ({error.strerror}): choose another path."
            raise RequestError("file_unwritable", sentence, path=str(target)) from None
        return target

    def _repr_html_(self) -> str:
        """The replay in a frame of its own, as notebooks show it."""
        from kvlens.player.page import player_html

        page = html.escape(player_html(self.reader), quote=True)
        return (
            f'<iframe srcdoc="{page}" title="Replay of run {self.uid}" loading="lazy" sandbox="allow-scripts" '
            f'style="width:100%;height:{FRAME_HEIGHT}px;border:0"></iframe>'
        )

    def __repr__(self) -> str:
        from kvlens.lens.knob import held_to

        meta = self.meta
        limit = "" if meta.observed is not None else f" with {held_to(meta)}"
        return f"<kvlens.Run {self.uid}: {code_name(meta)}{limit} on {meta.model}, {self.status}>"
