"""Why FreeKV did not correct a KV head: its queries were taken for similar enough (sec. 3.2)."""

from __future__ import annotations

from kvlens.lens.facts import Facts


def unmoved(facts: Facts) -> str:
    """By the threshold tau on the mean cosine of a group's queries."""
    tau = facts.reader.meta.config.get("tau")
    if tau == 0:
        return "tau is 0, which corrects no head"
    return f"query similarity {facts.similarity:.2f} is not below tau {tau}"
