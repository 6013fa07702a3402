"""Why a method cannot run as a static step."""

from __future__ import annotations

SENTENCES = {
    "not_static_ready": "its class does not say static_ready.",
    "shifted_keys": "it sees keys from elsewhere than they lie, which a static step does not.",
    "shared_zones": "its KV heads share the room for expanded spans, and a static step gives each a part of its own. "
    "Set zones=head.",
    "unequal_heads": "with these parameters some KV heads of a layer keep every token, and a static step lays all KV "
    "heads of a layer out alike.",
}
"""what the sentence says, by reason"""


class StaticRefused(ValueError):
    """A method, or its parameters, that the static step does not carry out."""

    code = "static_step_refused"

    def __init__(self, title: str, reason: str) -> None:
        """title: of the method. reason: a key of SENTENCES."""
        super().__init__(f"{title} cannot run as a static step ({self.code}): {SENTENCES[reason]}")
        self.values = {"method": title, "reason": reason}
