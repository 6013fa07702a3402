"""Why a span that full attention wanted was not attended exactly: read from what the run recorded, never guessed.

One reason per (step, layer, KV head, span). What the trace does not hold is said to be not recorded. What only a
method's own journal or parameters know is its part `reasons`' to tell (kvlens.lens.method_reasons); no method is named
here.
"""

from __future__ import annotations

from kvlens.lens.dropped import dropped, kept_by_others, ranking_words
from kvlens.lens.facts import Facts
from kvlens.lens.lines import lost_of, ranges_in_words
from kvlens.lens.method_reasons import MethodReasons, Told
from kvlens.lens.place import Ranking
from kvlens.lens.quantised import in_bits
from kvlens.lens.reasonkinds import BY_A_DROP, Reason
from kvlens.lens.spanstates import HOT, rebuilt
from kvlens.store.reader import TraceReader
from kvlens.text.units import counted


def explain(reader: TraceReader, step: int, layer: int, kv_head: int, span: int) -> Reason:
    """Why the span was not attended exactly by a KV head at a step."""
    return reason(Facts.gather(reader, step, layer, kv_head, span))


def reason(facts: Facts) -> Reason:
    """As `explain`, of facts that are at hand."""
    if facts.held:
        return Reason("held", "it was held exactly resident for this KV head by the counterfactual")
    if (dropped := facts.dropped_tokens) == (facts.tokens,) and facts.kind != "window":
        return Reason("dropped", "the what-if dropped it: this KV head was kept from attending it, wherever it lay")
    method_reason = _of_the_method(facts)
    if dropped:
        beside = "" if method_reason.kind in BY_A_DROP else f"; apart from that: {method_reason.says}"
        return Reason("dropped", f"the what-if dropped {ranges_in_words(dropped)} of it{beside}")
    if tokens := facts.held_tokens:
        return Reason(
            method_reason.kind, f"{method_reason.says}; {ranges_in_words(tokens)} of it were held by the counterfactual"
        )
    return method_reason


def _of_the_method(facts: Facts) -> Reason:
    """Apart from what a counterfactual held."""
    dropped_tokens = dropped(facts)
    if facts.state == "evicted":
        unasked = facts.unasked(_evicted_at(facts))
        return Reason("evicted_unasked" if unasked else "evicted", _evicted(facts, unasked))
    if facts.state == "partial" and dropped_tokens is not None:
        unasked = facts.unasked(facts.dropped_at())
        rest = "" if facts.ranking.candidates is None else f"; what is left of it: {facts.ranking.cut()}"
        return Reason("partly_evicted_unasked" if unasked else "partly_evicted", dropped_tokens + unasked + rest)
    method_reason: Told | None = MethodReasons.load(facts.reader).ask("told", facts)
    if method_reason is not None:
        return Reason(*method_reason)
    # before schema 6 a state spoke of all KV heads, and another one's tokens may be what made the span partial
    whole = dropped_tokens is None and not facts.reader.tells_moments() and facts.reader.ranks_what_it_drops()
    if facts.state == "partial" and not whole:
        lost = lost_of(facts.reader, facts.step, facts.layer, facts.kv_head, facts.span)
        full_note = f"; full attention wanted {ranges_in_words(lost)} most of them" if lost else ""
        return Reason(
            "partly_evicted", f"part of its tokens were evicted, without a ranking that was recorded{full_note}"
        )
    if facts.state == "partly_recalled":
        return _partly_recalled(facts)
    if facts.summarised:
        return _summarised(facts)
    if facts.state == "quantised":
        return Reason("quantised", f"all of its tokens were attended, in few bits: {in_bits(facts)}")
    if facts.state == "rewritten":
        return Reason("rewritten", f"all of its tokens were attended, {facts.rewritten()}")
    if facts.read:
        return _attended(facts)
    return _not_read(facts)


def _evicted_at(facts: Facts) -> int | None:
    """The step of the span's eviction, -1 for the end of prefill; None: it was not recorded."""
    evictions = facts.events[facts.events["kind"] == "evict"]
    return int(evictions["step"].iloc[-1]) if len(evictions) else None


def _evicted(facts: Facts, unasked: str) -> str:
    """Return what this KV head kept, when it evicted the rest and by which rule, and what the other KV heads kept."""
    step = _evicted_at(facts)
    when = "; the step of the eviction was not recorded"
    if step is not None:
        when = " at the end of prefill" if step < 0 else f" at step {step}"
    rule = MethodReasons.load(facts.reader).ask("evicted", facts) or ""
    size = facts.tokens[1] - facts.tokens[0]
    sentence = f"L{facts.layer} KV{facts.kv_head} kept none of its {counted(size, 'token')}{when}"
    ranking = ranking_words(facts)
    by_position, by_score = (ranking, "") if ranking.startswith(",") else ("", ranking)
    return f"{sentence}{by_position}{unasked}{f': {rule}' if rule else ''}{kept_by_others(facts)}{by_score}"


def _partly_recalled(facts: Facts) -> Reason:
    """A span of which some tokens were recalled, with their number and the tokens that full attention wanted most of
    the others."""
    whole = facts.tokens[1] - facts.tokens[0]
    lost = lost_of(facts.reader, facts.step, facts.layer, facts.kv_head, facts.span)
    lost_words = f"; full attention wanted {ranges_in_words(lost)} most of the others" if lost else ""
    cut = "" if facts.ranking.candidates is None else f"; {facts.ranking.cut()}"
    return Reason(
        "partly_recalled",
        f"{facts.on_device} of its {whole:,} tokens were on the device, the others in host memory{lost_words}{cut}",
    )


# ---- spans that lie on the device exactly, or not
def _attended(facts: Facts) -> Reason:
    """A span without a summary, on which this KV head put mass. Where the run has no summaries at all, a span that is
    attended whole gets at least what full attention gives it; less means that part of its tokens was not attended.
    What each query head left out is recorded from schema 6 on."""
    readings = facts.readings
    words = set(readings.values())
    if "none" in words and ("all" in words or "part" not in words):
        # masses are recorded to about 1e-5: a head that gave its tokens less cannot be told from one that read none
        says = {"all": "read all of it", "part": "read part of it", "none": "gave it nothing"}
        heads = ", ".join(f"Q{head} {says[word]}" for head, word in sorted(readings.items()))
        which = facts.ranking.words() if facts.ranking.wanted else ""
        return Reason("some_heads", f"it was on the device{which}: {heads}")
    if facts.state == "reconstructed":
        return Reason("rank_truncated", f"it was attended as {_rebuilt(facts)}")
    if facts.exact_only and not facts.short:
        return Reason("attended", "it was on the device and read; full attention would have given it no more")
    if facts.averaged:
        return Reason(
            "averaged",
            f"it was read{facts.ranking.words()}; a mean of all values stood for {facts.averaged:.0%} of query head "
            f"{facts.q_head}'s output, with which no span is credited",
        )
    if not facts.exact_only:
        return Reason(
            "attended", "its tokens were on the device and attended exactly; this head's mass went to other entries"
        )
    if facts.kind == "window" and facts.ranking.candidates is None:
        return Reason(
            "partly_attended", "its oldest tokens left the window and were evicted; the others were attended exactly"
        )
    which = f"{facts.ranking.words()}" if facts.ranking.wanted else ""
    return Reason(
        "partly_attended",
        f"it was read{which}, but not whole by every query head of the group; which tokens or heads was not recorded",
    )


def _not_read(facts: Facts) -> Reason:
    """A span without a summary. That it was not read is known where full attention by span was recorded and lists it,
    or where its state or the selection that was read says so."""
    ranking = facts.ranking
    if facts.waits and facts.similarity is not None:
        previous_step = facts.previous_ranking
        if previous_step.wanted:
            return Reason(
                "attended", f"step {facts.step - 1} had selected it, so that it was on the device and attended exactly"
            )
        why = MethodReasons.load(facts.reader).ask("unmoved", facts) or f"query similarity {facts.similarity:.2f}"
        sentence = f"not corrected: {why}, so this step read what step {facts.step - 1} had selected"
        if ranking.wanted:
            return Reason(
                "not_corrected", f"{sentence}; it would have chosen this span now{ranking.words()}, one step late"
            )
        if facts.born == facts.step:
            return Reason("not_corrected", f"{sentence}, and the span left the window only afterwards")
        now = "" if ranking.candidates is None else f"; by this step's own query: {ranking.cut()}"
        return Reason("not_corrected", f"{sentence}; by that step's query: {previous_step.cut()}{now}")
    if facts.refused:
        return Reason(
            "refused", f"it was wanted{ranking.words()} but did not fit the budget's room for recalled tokens"
        )
    if facts.state == "cold":
        given_up = ", the device's copy given up at this step" if facts.given_up else ""
        return _left_out(f"it lay in host memory{given_up}", ranking)
    unread = facts.read is False or (ranking.rank is not None and not ranking.wanted)
    if facts.state in HOT and ranking.wanted and unread:
        chosen_note = (
            "it was on the device and chosen for some query head of the group, but none of them gave it anything"
        )
        return Reason("some_heads", f"{chosen_note}: {ranking.cut()}")
    if facts.state in HOT and ranking.candidates is not None and unread:
        return _left_out("it was on the device but not read", ranking)
    return Reason("unknown", "whether it was read, or where it lay, was not recorded")


def _left_out(where: str, ranking: Ranking) -> Reason:
    """Not chosen: for its score, where the scores that were recorded bear that out."""
    if ranking.passed_over:
        return Reason("passed_over", f"{where}: {ranking.cut()}; more than this score decided")
    return Reason("below_the_cut", f"{where}: {ranking.cut()}")


# ---- spans with a summary
def _summarised(facts: Facts) -> Reason:
    """A span that every query head reads either through its summary or, once it is on the device, token by token."""
    ranking = facts.ranking
    if facts.state in ("reconstructed", "resident"):
        return _on_the_device(facts)
    if facts.state != "coarse":
        return Reason("unknown", "where it lay, or why it was not read, was not recorded")
    if not facts.waits:
        if facts.refused:
            return Reason(
                "refused", f"it was wanted{ranking.words()} but did not fit the budget's room for recalled tokens"
            )
        return Reason("coarse_only", f"only its summary was attended: {ranking.cut()}")
    if facts.refused:
        words = facts.previous_ranking.words()
        return Reason(
            "refused",
            f"step {facts.step - 1} wanted it for this step{words}, but it did not fit the room for recalled tokens",
        )
    if facts.moving:
        later = "moved behind its back, to be read from the next step on"
        return Reason("one_step_late", f"it was selected at this step{ranking.words()} and {later}")
    if facts.step == 0:
        return Reason(
            "coarse_only",
            "only its summary was attended: the step before chooses what is on the device, and this is the first",
        )
    chose = f"at step {facts.step - 1}, which chose what is on the device now, {facts.previous_ranking.cut()}"
    return Reason("coarse_only", f"only its summary was attended: {chose}")


def _on_the_device(facts: Facts) -> Reason:
    """Which query heads read it token by token is known where all or none of the spans on the device were read so."""
    ranking, raw = facts.ranking, facts.state == "resident"
    lay = "its tokens were on the device" if raw else f"it was on the device as {_rebuilt(facts)}"
    if ranking.rank is not None and not ranking.wanted:
        unasked = f"{lay}, but no query head asked for them at this step"
        return Reason("coarse_only", f"{unasked}, only its summary was attended: {ranking.cut()}")
    if facts.fine is False:
        return Reason(
            "coarse_only", f"{lay}, but query head {facts.q_head}, which missed most, read summaries alone at this step"
        )
    if facts.fine:
        if raw:
            return Reason(
                "attended", "its tokens were on the device and attended exactly; this head's mass went to other entries"
            )
        return Reason("rank_truncated", f"it was attended as {_rebuilt(facts)}")
    which = "which query heads of the group read that, and which its summary alone, was not recorded"
    return Reason("by_query_head", f"{lay}; {which}")


def _rebuilt(facts: Facts) -> str:
    return rebuilt(facts.reader, facts.layer, facts.kv_head, facts.span)
