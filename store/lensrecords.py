"""The part of the reader that says what a run lost against full KV: the loss by step, full attention by span, regret,
span keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from kvlens.meta import RunMeta
from kvlens.store import lensqueries
from kvlens.store.session import Session


class LensRecords:
    """Base of TraceReader. Empty frames, NaN and None where it was not recorded. Masses and regrets are shares 0..1, kl
    and logarithms of probabilities in nats. own: own-query mass, full attention by the run's own query over the exact
    keys; reference: full KV's own mass, of full KV fed the run's tokens (NaN: not recorded, as before schema 10 and
    without a reference). full = reference where it was recorded, else own; regret = max(0, full - the method's mass),
    the mass of a span's summary counted as read, and at most the share of full that was not read as full attention
    reads it (a drifted query alone is no regret); unread = of full, the mass on tokens of the span that were attended
    in no form, neither exactly nor rebuilt nor through its summary (NaN: not recorded, as before schema 6). own_regret,
    own_unread: the same two of own."""

    _db: Session
    n_layers: int
    n_steps: int
    q_heads: int
    kv_heads: int
    meta: RunMeta

    def loss(self) -> pd.DataFrame:
        """One row per step that was compared with the full-KV reference: step, ref_token, ref_text, top_token,
        top_text, agrees, kl, ref_logprob, logprob, logit_diff, ref_rank (see kvlens.instruments.Loss)."""
        return self._db.frame(lensqueries.LOSS)

    def oracle(self, step: int, layer: int, q_head: int) -> pd.DataFrame:
        """The spans with most of `full`, most first: span, full, mass (the method's), regret, unread, own, own_regret,
        own_unread, reference, kind, tok_start, tok_end, reason (of the span)."""
        return self._db.frame(lensqueries.ORACLE, step=step, layer=layer, q_head=q_head)

    def mass_on_spans(self, spans: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return `full` and this run's mass on some spans together, each float32 [steps, layers, query heads]; NaN
        where full attention was not sampled. A span that a query head did not list counts as 0, so both are lower
        bounds."""
        shape = (self.n_steps, self.n_layers, self.q_heads)
        rows = self._db.frame(
            lensqueries.MASS_ON_SPANS, spans=" ".join(map(str, spans)), layers=self.n_layers, heads=self.q_heads
        )
        masses = np.full((2, int(np.prod(shape))), np.nan, np.float32)
        masses[:, rows["place"].to_numpy(np.int64)] = rows[["full", "mass"]].to_numpy(np.float32).T
        full, mass = masses.reshape(2, *shape)
        return full, mass

    def has_reference_masses(self) -> bool:
        """Return whether full KV's own masses were recorded, at some step."""
        return bool(self._db.rows(lensqueries.HAS_REFERENCE)[0][0])

    def mean_full(self) -> pd.DataFrame:
        """span, own, reference: means over all query heads and steps that were sampled; lower bounds, as only top spans
        are listed."""
        return self._db.frame(lensqueries.MEAN_FULL)

    def oracle_tail(self, step: int, layer: int, q_head: int) -> float:
        """What `full` has on the spans that `oracle` does not list."""
        found = self._db.rows(lensqueries.ORACLE_TAIL, step=step, layer=layer, q_head=q_head)
        return float(found[0][0]) if found else float("nan")

    def oracle_step(self, step: int) -> pd.DataFrame:
        """`oracle` of all query heads that were sampled at a step: layer, q_head, kv_head, span, full, mass, regret,
        unread, own, own_regret, own_unread, reference."""
        return self._db.frame(lensqueries.ORACLE_STEP, step=step, group=self.q_heads // self.kv_heads)

    def oracle_head(self, layer: int, q_head: int) -> pd.DataFrame:
        """`oracle` of one query head at all steps: step, span, full, mass, regret, unread, own, own_regret, own_unread,
        reference."""
        return self._db.frame(lensqueries.ORACLE_HEAD, layer=layer, q_head=q_head)

    def oracle_tails(self, layer: int, q_head: int) -> pd.DataFrame:
        """step, tail_full of one query head at the steps at which full attention was sampled."""
        return self._db.frame(lensqueries.ORACLE_TAILS, layer=layer, q_head=q_head)

    def oracle_layer(self, layer: int) -> pd.DataFrame:
        """Return `oracle_head` of all query heads of a layer: q_head, step, span, full, mass, regret, unread, own,
        own_regret, own_unread, reference."""
        return self._db.frame(lensqueries.ORACLE_LAYER, layer=layer)

    def oracle_tails_of_layer(self, layer: int) -> pd.DataFrame:
        """Return `oracle_tails` of all query heads of a layer: q_head, step, tail_full."""
        return self._db.frame(lensqueries.ORACLE_TAILS_OF_LAYER, layer=layer)

    def lost_in_layer(self, layer: int) -> pd.DataFrame:
        """Return `lost_by_head` of all query heads of a layer: q_head, step, pos, mass."""
        return self._db.frame(lensqueries.LOST_IN_LAYER, layer=layer)

    def holes(self, least: float) -> pd.DataFrame:
        """What some query head wanted and could not attend, by step and span: step, span, mass (unread of `full`,
        of the head that lost most; its regret where unread was not recorded), layer, q_head. Only masses of at least
        `least`."""
        return self._db.frame(lensqueries.HOLES, least=least)

    def summary_losses(self, least: float) -> pd.DataFrame:
        """What query heads attended less than full KV did, of spans that begin as summaries: step, layer, q_head, span,
        mass (regret, at least `least`). Spans that a head did not attend in any form are left to `holes`. The state at
        the step is `state_changes`' to say."""
        return self._db.frame(lensqueries.SUMMARY_LOSSES, least=least)

    def regret_by_step(self) -> pd.DataFrame:
        """Total regret of query heads at the steps that were sampled, by full KV's own mass where it was recorded:
        step, regret_mean, regret_max (over the sampled heads), layer and q_head of the largest. Empty at trace level
        'summary'."""
        return self._db.frame(lensqueries.REGRET_BY_STEP)

    def triples(self, step: int) -> pd.DataFrame:
        """layer, kv_head, span, full, mass, own, reference, regret, unread, hidden (what of unread each query head's
        regret does not show): means over the query heads of a KV head, most regret first. A query head that did not
        list a span counts as 0, so each is a lower bound. effect, place: as `effects` has them, NaN of what it does
        not list."""
        group, keys = self.q_heads // self.kv_heads, ["layer", "kv_head", "span"]
        frame = self._db.frame(lensqueries.TRIPLES, step=step, group=group)
        return frame.merge(self.effects(step)[[*keys, "place"]], "left", keys)

    def effects(self, step: int) -> pd.DataFrame:
        """layer, kv_head, span, effect, lead of the lost steps, both in logits, place (from 1 on), in the order of
        places (see kvlens.instruments.Effects). `meta.effect_steps` has the steps over which they are added; where it
        is empty they are of this step alone, and the place is that by effect. Empty where they were not recorded, as
        before schema 9."""
        frame = self._db.frame(lensqueries.EFFECTS, step=step)
        places = {triple: place for place, triple in enumerate(self.meta.effect_order)}
        named = frame[["layer", "kv_head", "span"]].astype(int).itertuples(index=False, name=None)
        frame["place"] = [places.get(triple, len(places)) for triple in named]
        frame = frame.sort_values("place", kind="stable", ignore_index=True)
        return frame.assign(place=range(1, len(frame) + 1))

    def lost_tokens(self, step: int) -> pd.DataFrame:
        """The tokens with most unread mass of every query head that was sampled at a step, most first: layer, q_head,
        kv_head, pos, mass (full KV's own where it was recorded, else own-query mass). At most
        kvlens.recording.oracle.LOST_TOKENS of each."""
        return self._db.frame(lensqueries.LOST_TOKENS, step=step, group=self.q_heads // self.kv_heads)

    def lost_by_head(self, layer: int, q_head: int) -> pd.DataFrame:
        """`lost_tokens` of one query head at all steps: step, pos, mass."""
        return self._db.frame(lensqueries.LOST_BY_HEAD, layer=layer, q_head=q_head)

    def span_keys(self, layer: int, kv_head: int) -> tuple[np.ndarray, np.ndarray, str] | None:
        """Mean keys of the prompt's spans: span ids int64 [S], keys float32 [S, D], and their form (pre-rope or
        post-rope); None when not recorded."""
        found = self._db.rows(lensqueries.SPAN_KEYS, layer=layer, kv_head=kv_head)
        if not found:
            return None
        spans, forms, keys = zip(*found, strict=True)
        return np.array(spans, np.int64), np.array(keys, np.float32), str(forms[0])
