"""The part of the reader that returns the sizes of a run's model and prompt."""

from __future__ import annotations

from kvlens.meta import RunMeta
from kvlens.shape import KVShape
from kvlens.store import queries
from kvlens.store.errors import NotRecorded
from kvlens.store.session import Session


class SizeRecords:
    """Base of TraceReader. A run's meta may lack each of these sizes."""

    _db: Session
    uid: str
    meta: RunMeta
    n_layers: int
    q_heads: int
    kv_heads: int

    def prompt_tokens(self) -> int:
        """Return the number of the prompt's tokens, counted in the table of tokens if the meta lacks the number."""
        recorded = self.meta.prompt_tokens
        return int(self._db.rows(queries.PROMPT_TOKENS)[0][0]) if recorded is None else recorded

    def max_new(self) -> int:
        """Return the requested number of steps. Raises NotRecorded."""
        return self._require_size("max_new", self.meta.max_new)

    def kv_shape(self) -> KVShape:
        """Return the sizes of the run's model. Raises NotRecorded."""
        head_dim = self._require_size("head_dim", self.meta.head_dim)
        numbers = self.n_layers * self.kv_heads * 2 * head_dim
        token_bytes = self._require_size("token_bytes", self.meta.token_bytes)
        return KVShape(self.n_layers, self.q_heads, self.kv_heads, head_dim, token_bytes // numbers, self.meta.windows)

    def _require_size(self, name: str, size: int | None) -> int:
        if not size:
            remedy = (
                "make the run again" if self.meta.imported is None else f"log {name} in trace.json and import it again"
            )
            raise NotRecorded(f"The trace of run {self.uid} does not record {name}; {remedy}.")
        return size
