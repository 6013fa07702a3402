"""What the paper of StreamingLLM claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "StreamingLLM sec. 3.1, Tables 1 and 2",
        "Once the first tokens leave a window, the text is lost; four of them, kept, bring most of it back.",
        arm("streaming_llm", "20%"),
        (arm("streaming_llm", "20%", sinks=0),),
        figure="kl",
    ),
    Statement(
        "StreamingLLM sec. 3.1, Table 2",
        "Four first tokens are enough; more bring little.",
        arm("streaming_llm", "20%"),
        (arm("streaming_llm", "20%", sinks=8), arm("streaming_llm", "20%", sinks=16)),
        "as good",
        figure="kl",
        beside=(arm("streaming_llm", "20%", sinks=1),),
    ),
)
