"""What the paper of ChunkKV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "ChunkKV abstract",
        "Keeping whole chunks answers more than keeping single tokens by the same scores, and than SnapKV.",
        arm("chunkkv", "20%"),
        (arm("chunkkv", "20%", page=1), arm("snapkv", "20%")),
    ),
    Statement(
        "ChunkKV, reuse of indices over layers",
        "Letting a layer keep what the one before it chose costs little.",
        arm("chunkkv", "20%"),
        (arm("chunkkv", "20%", reuse=1),),
        "as good",
    ),
)
