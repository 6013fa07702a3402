"""Where a span stood in a step's ranking, and in which words."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.store.reader import TraceReader


@dataclass(frozen=True)
class Ranking:
    """What a step's ranking of a KV head says of one span."""

    candidates: int | None
    """spans that were ranked; None: no ranking was recorded"""
    listed: int
    """of these, how many were recorded, best first"""
    chosen: int
    """among the recorded"""
    rank: int | None
    """1 = best; None: not among the recorded"""
    score: float | None
    wanted: bool
    outscored: int = 0
    """chosen ones among the recorded that scored less than this one"""

    @classmethod
    def read(cls, reader: TraceReader, step: int, layer: int, kv_head: int, span: int) -> Ranking:
        frame = reader.scores(step, layer, kv_head)
        row = frame[frame["span"] == span]
        is_ranked = len(row) > 0
        score = float(row["score"].iloc[0]) if is_ranked else None
        return cls(
            frame.attrs["candidates"],
            len(frame),
            int(frame["chosen"].sum()) if len(frame) else 0,
            int(row["rank"].iloc[0]) if is_ranked else None,
            score,
            bool(row["chosen"].iloc[0]) if is_ranked else False,
            0 if score is None else int((frame["chosen"] & (frame["score"] < score)).sum()),
        )

    @property
    def passed_over(self) -> bool:
        """It was not chosen, and others were that scored less: the score alone did not decide."""
        return not self.wanted and self.outscored > 0

    def words(self) -> str:
        """' (rank 3 of 45)', or nothing where no ranking was recorded."""
        if self.candidates is None:
            return ""
        return (
            f" (rank {self.rank} of {self.candidates})"
            if self.rank
            else f" (below the {self.listed} best of {self.candidates})"
        )

    def cut(self) -> str:
        """The sentence about rank and cut. How many of all candidates were chosen is known only where all that are
        chosen are listed."""
        if self.candidates is None:
            return "its rank was not recorded"
        least = "at least " if self.chosen == self.listed < self.candidates else ""
        whole = self.listed == self.candidates or least
        many = (
            f"{least}{self.chosen} of {self.candidates} candidates"
            if whole
            else f"{self.chosen} of the {self.listed} best"
        )
        if self.rank is None:
            return f"it was not among the {self.listed} best recorded of {self.candidates} candidates, {many} chosen"
        candidate_note = "" if whole else f" of {self.candidates} candidates"
        over = f", though {self.outscored} of those scored less" if self.passed_over else ""
        was = "was" if self.wanted else "was not"
        return f"rank {self.rank}{candidate_note} (score {self.score:.4g}), {many} chosen, this one {was}{over}"
