"""The table by which SeKV's queries find spans, and the decision which of them are expanded (SeKV sec. 3.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvlens.kernels.best_rows import best_rows
from kvlens.kernels.span_routes import Routes, RouteTable, fits, routed_triton
from kvlens.memory.placement import Gate, Selection, index_read
from kvlens.methods.run_inputs import RunContext
from kvlens.methods.sekv import router as sekv_router
from kvlens.methods.sekv.params import BY_PIECE, SeKVParameters
from kvlens.methods.sekv.spans import pieces
from kvlens.shape import KVShape

if TYPE_CHECKING:
    from kvlens.methods.sekv.router import Router


class Routing:
    """Rows of spans in the order of birth, and thresholds per query head. Shapes: C rows, T queries, P pieces, d'
    `dim`.

    table: what a query is multiplied with; [L, Hq, C, d'] unit summaries in the routing space (eq. 3), or, with
    router=mean, [L, H_kv, P, D] mean keys of pieces, times `scale` [L, H_kv, P, 1] where they lie in 8 bits; with
    router=bound there are two rows for a piece.
    """

    def __init__(
        self, params: SeKVParameters, context: RunContext, rows: tuple[int, int], trained: Router | None
    ) -> None:
        """rows: (C, P) at most."""
        shape, device = context.shape, context.device
        self.params, self.shape, self.trained = params, shape, trained
        spans, pieces = rows
        self._used = [0, 0]
        """rows of spans and of pieces"""
        self.by_piece = params.router in BY_PIECE
        self.per_piece = BY_PIECE.get(params.router, 0)
        self.span = torch.zeros(spans, dtype=torch.long, device=device)
        """ids, 0: the row is not in use"""
        self.length = torch.ones(spans, device=device)
        self._own: tuple[torch.Tensor, ...] = ()
        """what is held beside table, span and length"""
        if self.by_piece:
            self._make_pieces(pieces, context)
            return
        self.table = torch.zeros(shape.layers, shape.q_heads, spans, params.dim, dtype=context.dtype, device=device)
        if trained is not None:
            self.weight, self.threshold = trained.weight.to(device), trained.threshold.to(device)
            if trained.gates is not None:
                trained.gates.to(device)
        else:
            self.weight = torch.zeros(shape.layers, shape.kv_heads, params.dim, shape.head_dim, device=device)
            self.threshold = torch.zeros(shape.layers, shape.q_heads, device=device)
            self._own = (self.weight, self.threshold)

    def _make_pieces(self, pieces: int, context: RunContext) -> None:
        shape, device = context.shape, context.device
        size, exact = (shape.layers, shape.kv_heads, pieces * self.per_piece), self.params.index == "exact"
        stored_dtype = context.dtype if exact else torch.int8
        self.table = torch.zeros(*size, shape.head_dim, dtype=stored_dtype, device=device)
        self.scale = torch.ones(1, 1, 1, 1, device=device) if exact else torch.zeros(*size, 1, device=device)
        self.owner = torch.full((pieces,), -1, dtype=torch.long, device=device)
        """row of the span that a piece is of, -1: not in use"""
        self.tokens = torch.ones(pieces, device=device)
        """of a piece"""
        self.threshold = torch.zeros(shape.layers, shape.q_heads, device=device)
        self._own = (self.owner, self.tokens, self.threshold, *(() if exact else (self.scale,)))

    def fit(self, keys: torch.Tensor) -> None:
        """W of the pca router from the prompt's keys [L, H_kv, n, D]; the others need none, or have theirs."""
        if self.trained is None and not self.by_piece:
            self.weight.copy_(sekv_router.fit_pca(keys, 1, self.params.dim))

    def add(
        self,
        ids: Sequence[int],
        ranges: Sequence[tuple[int, int]],
        mean_keys: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Rows for spans `ids` with mean keys [L, H_kv, S, D], which lie at `ranges` of keys [L, H_kv, m, D] with
        weights [m] (eq. 2) -> their summaries averaged over the group [L, H_kv, S, d'], an input of trained gates."""
        first_span = self._used[0]
        rows = slice(first_span, first_span + len(ids))
        self.span[rows] = torch.tensor(ids, dtype=torch.long)
        self.length[rows] = torch.tensor([end - start for start, end in ranges], dtype=self.length.dtype)
        self._used[0] += len(ids)
        if self.by_piece:
            self._add_pieces(first_span, ranges, keys, weights)
            return mean_keys
        summary = sekv_router.summaries(self._heads(self.weight), mean_keys.float())
        self.table[:, :, rows] = summary.to(self.table.dtype)
        return summary.unflatten(1, (self.shape.kv_heads, -1)).mean(2)

    def _add_pieces(
        self, first: int, ranges: Sequence[tuple[int, int]], keys: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Pieces of the spans whose rows begin at `first`."""
        cuts = [pieces(start, end, self.params.piece) for start, end in ranges]
        piece_spans = [first + place for place, of_span in enumerate(cuts) for _ in of_span]
        parts = [part for of_span in cuts for part in of_span]
        if self.params.router == "mean":
            new_pieces = sekv_router.span_means(keys, weights, parts)
        else:
            new_pieces = sekv_router.ranges_of_keys(keys, parts)
        row_slice = slice(self._used[1], self._used[1] + len(piece_spans))
        rows = slice(row_slice.start * self.per_piece, row_slice.stop * self.per_piece)
        if self.params.index == "exact":
            self.table[:, :, rows] = new_pieces.to(self.table.dtype)
        else:
            self.table[:, :, rows], self.scale[:, :, rows] = sekv_router.to_bytes(new_pieces)
        self.owner[row_slice] = torch.tensor(piece_spans, dtype=torch.long)
        self.tokens[row_slice] = torch.tensor([b - a for a, b in parts], dtype=self.tokens.dtype)
        self._used[1] += len(piece_spans)

    def fit_threshold(self, queries: torch.Tensor, prompt_tokens: int, ends: torch.Tensor) -> None:
        """Thresholds of a router that has none from the last prompt queries [L, Hq, w, D]; a span counts for queries
        after its last token. ends [S]: of the prompt's spans."""
        if self.trained is None and len(ends):
            unseen = (ends > torch.arange(prompt_tokens - queries.shape[2], prompt_tokens)[:, None]).to(queries.device)
            for layer in range(self.shape.layers):  # of all at once a long prompt's scores would be gigabytes
                score = self.score(layer, queries[layer])[..., : len(ends)]
                self.threshold[layer] = sekv_router.fit_threshold(
                    score.masked_fill(unseen, float("-inf")), self.params.zoom_rate
                )
        if self.params.tau >= 0:
            self.threshold.fill_(float(sekv_router.logit(torch.tensor(self.params.tau))))

    def bytes_read(self) -> int:
        """Of the table in one layer, for one KV head's query heads: rows in use, with their scales."""
        spans, rows = self._used[0], self._used[1] * self.per_piece
        numbers = rows * self.shape.head_dim if self.by_piece else self.shape.group * spans * self.params.dim
        scales = rows * self.scale.element_size() if self.by_piece and self.params.index == "int8" else 0
        return numbers * self.table.element_size() + scales

    def score(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Of spans for queries [Hq, T, D] of a layer -> [Hq, T, C]; -inf for rows that are not in use."""
        if self.by_piece:
            scale = self.scale[layer] if self.params.index == "int8" else self.scale[0]
            table, spans = self.table[layer], len(self.span)
            if self.params.router == "bound":
                return sekv_router.bound_scores(q.float(), table, scale, self.owner, spans)
            return sekv_router.piece_scores(q.float(), table, scale, self.tokens, self.owner, spans)
        routed = sekv_router.route(self._heads(self.weight[layer]), q.float())
        return sekv_router.scores(routed, self.table[layer].float(), self.length, self.span > 0)

    def expanded(self, layer: int, score: torch.Tensor) -> torch.Tensor:
        """z of eq. 9 for scores [Hq, T, C]."""
        return sekv_router.expand(score, self.threshold[layer])

    def routes(self, layer: int, q: torch.Tensor, spans: int) -> Routes | None:
        """Return what queries [Hq, D] of a layer ask for, of `spans` span ids, by the kernel; None where it does not
        take them."""
        if self.by_piece:
            return None
        table = RouteTable(self.weight[layer], self.table[layer], self.length, self.span, self.threshold[layer])
        if not fits(q, table, self.params.pool):
            return None
        return routed_triton(q, table, self.shape.kv_heads, spans, self.params.pool)

    def pooled(self, score: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """Return the priority of a span for its KV head [H_kv, C] from scores [H_kv, G, C] and who asks for it, bool of
        the same shape."""
        return sekv_router.pooled(self.params.pool, score, requests)

    def held(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the device holds for this prompt; a trained W belongs to the model."""
        return (self.table, self.span, self.length, *self._own)

    def _heads(self, weight: torch.Tensor) -> torch.Tensor:
        """W [..., Hq or H_kv, d', D] -> one per query head."""
        return weight if self.trained is not None else weight.repeat_interleave(self.shape.group, dim=-3)


class WholeHeads:
    """KV heads that keep every token. mask bool [L, H_kv]."""

    def __init__(self, heads: Iterable[tuple[int, int]], shape: KVShape, device: torch.device) -> None:
        """heads: (layer, KV head)."""
        self.mask = torch.zeros(shape.layers, shape.kv_heads, dtype=torch.bool, device=device)
        for layer, head in heads:
            self.mask[layer, head] = True
        counts = self.mask.sum(1).tolist()
        self.some = frozenset(layer for layer, count in enumerate(counts) if 0 < count < shape.kv_heads)
        """layers in which some KV heads are whole, and others not"""
        self.all = frozenset(layer for layer, count in enumerate(counts) if count == shape.kv_heads)


def selection(
    params: SeKVParameters,
    shape: KVShape,
    routing: Routing,
    capacity: int,
    whole: WholeHeads,
    layer: int,
    q: torch.Tensor,
    records: bool = True,
    launch: bool = False,
) -> Selection | None:
    """Of queries q [Hq, D]; capacity: span ids; records: what is for the log alone is computed; launch: by the kernel
    where it takes them, without what is for the log. None: there is nothing to choose."""
    if params.zoom == "off" or len(routing.span) == 0 or layer in whole.all:
        return None
    if launch and params.reconstruction and layer not in whole.some:
        routes = routing.routes(layer, q, capacity)
        if routes is not None:
            return _asked(params, routing, routes.fine, routes.wishes)
    alive = routing.span > 0
    if layer in whole.some:
        alive = alive & ~whole.mask[layer, :, None]
    score = routing.score(layer, q[:, None])
    z = routing.expanded(layer, score)[:, 0].unflatten(0, (shape.kv_heads, -1))
    best = routing.pooled(score[:, 0].unflatten(0, (shape.kv_heads, -1)), z)
    empty = torch.zeros(*z.shape[:2], capacity, dtype=torch.bool, device=q.device)
    index = routing.span.expand_as(z)
    priority = best.masked_fill(~(z.any(1) & alive), float("-inf"))
    wishes = best_rows(priority, priority.shape[1], routing.span)
    if not params.reconstruction:
        z, wishes = torch.zeros_like(z), torch.full_like(wishes, -1)
    result = _asked(params, routing, empty.scatter(2, index, z), wishes)
    if not records:
        return result
    nan = torch.full((shape.kv_heads, capacity), float("nan"), device=q.device)
    logged = nan.scatter(1, routing.span.expand_as(best), best.masked_fill(~alive, float("nan")))
    if layer in whole.some:
        zoomable = empty[:, 0].scatter(1, routing.span.expand_as(best), alive)
    else:
        zoomable = empty[0, 0].scatter(0, routing.span, alive)
    highest = score[:, 0].unflatten(0, (shape.kv_heads, -1)).masked_fill(~alive[..., None, :], float("-inf"))
    gate = Gate(highest.amax(-1).flatten(), routing.threshold[layer])
    return replace(result, zoomable=zoomable, score=logged, gate=gate)


def _asked(params: SeKVParameters, routing: Routing, fine: torch.Tensor, wishes: torch.Tensor) -> Selection:
    """Spans that are asked for, fine bool [H_kv, G, S], and wishes [H_kv, C], as a selection without what is for the
    log."""
    later = None
    if params.zoom == "next":
        later = torch.zeros(len(wishes), dtype=torch.bool, device=wishes.device)
    read = index_read(routing.bytes_read)
    return Selection(fine, wishes, now=later, cause="zoom", later_cause="zoom", index_bytes=read)
