"""The kinds of reasons for a missed span, and a reason with its cause."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = {
    "held": "a counterfactual held it exactly resident",
    "dropped": "a counterfactual dropped it: not attended, wherever it lay",
    "attended": "read exactly: full attention would have given it no more, or the mass went to summaries",
    "partly_attended": "not all of its tokens were attended by all query heads of the group",
    "elsewhere": "attended whole, while keys were seen from other positions than their own",
    "averaged": "read, at least in part; a mean value stood in for the tokens that were not attended",
    "some_heads": "query heads of the group attended it differently: some read it, others gave it nothing",
    "evicted": "it was evicted",
    "evicted_unasked": "evicted before the question was known",
    "partly_evicted_unasked": "some of its tokens were evicted before the question was known",
    "partly_evicted": "some of its tokens were evicted",
    "partly_recalled": "some of its tokens were recalled to the device, the others lay in host memory",
    "refused": "wanted, but there was no room for it within the budget",
    "not_corrected": "this step read what the step before had selected, and the queries were taken for similar enough",
    "one_step_late": "wanted now, moved behind the step's back, readable from the next step on",
    "below_the_cut": "scored below what was chosen",
    "passed_over": "not selected, although spans with lower scores were: the score alone did not decide",
    "coarse_only": "only its summary was attended",
    "quantised": "attended whole, in few bits: nothing is missing, its score is off",
    "rewritten": "attended whole, some of its keys or values merged or rounded: nothing is missing, its score is off",
    "rank_truncated": "attended through low-rank factors",
    "by_query_head": "on the device; which query heads read it token by token and which its summary was not recorded",
    "unknown": "not recorded",
}
"""kind -> what it means"""


BY_A_DROP = {
    "attended",
    "partly_attended",
    "elsewhere",
    "some_heads",
    "quantised",
    "rewritten",
    "by_query_head",
    "unknown",
}
"""kinds that a drop of some of the tokens brings about by itself, or makes false"""


@dataclass(frozen=True)
class Reason:
    """kind: one of KINDS; says: one sentence without its full stop, of recorded figures."""

    kind: str
    says: str

    @property
    def cause(self) -> str:
        """What it has in common with others of its kind: the words that losses are grouped by."""
        return cause(self.kind, self.says)


def cause(kind: str, says: str) -> str:
    """What a kind means; of one that is no one's to tell, its sentence."""
    return KINDS.get(kind, says)
