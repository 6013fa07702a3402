"""Surprisals of the prompt's tokens that were not known when its rows were put."""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow as pa

from kvlens.store.errors import TraceError


def put_surprisals(con: duckdb.DuckDBPyConnection, nats: np.ndarray, prompt_tokens: int) -> None:
    """Into the prompt's rows of `token`, inside the caller's transaction. nats: float32 [prompt_tokens]; NaN is stored
    as NULL. Raises TraceError for another number of them."""
    if nats.shape != (prompt_tokens,):
        raise TraceError(
            f"{nats.size} surprisals are logged of a prompt of {prompt_tokens} tokens; this is a fault of kvlens.",
            code="wrong_count",
            surprisals=nats.size,
            tokens=prompt_tokens,
        )
    recorded = pa.array(nats.astype(np.float32), mask=np.isnan(nats))
    con.register("incoming", pa.table({"pos": np.arange(nats.size), "surprisal": recorded}))
    try:
        con.execute(
            "UPDATE token SET surprisal = incoming.surprisal FROM incoming "
            "WHERE token.pos = incoming.pos AND token.step IS NULL"
        )
    finally:
        con.unregister("incoming")
