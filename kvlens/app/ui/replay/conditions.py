"""Conditions of a run that kvlens did not steer, in sentences."""

from __future__ import annotations

from kvlens.metaparts import Observed


def observed_conditions(observed: Observed) -> list[str]:
    """What was seen of a run that kvlens did not steer, a sentence each."""
    mass, ambiguous = observed.unmatched_mass, observed.entries.get("ambiguous", 0)
    unmatched = "not recorded" if mass is None else f"{mass:.4f}"
    drawn = {None: "not recorded", True: "yes", False: "no"}[observed.sampled]
    return [
        f"Attention on keys that match no written key: {unmatched}.",
        *([f"Entries whose key equals several written keys, some of them gone: {ambiguous:,}."] if ambiguous else []),
        f"Tokens were sampled: {drawn}.",
        f"Later forward passes that were not recorded: {observed.stopped or 'none'}.",
        *([f"No full attention: {observed.no_full_attention}."] if observed.no_full_attention else []),
        f"No comparison with full KV: {observed.no_reference or 'there is one'}.",
    ]
