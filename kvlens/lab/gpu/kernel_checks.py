"""Every kernel on the device against its float64 reference, on random data of every type that a model's keys and values
come in; what only moves or plans is checked in exact_checks.py.

What Triton's interpreter cannot show is shown here: bf16, fp16 and tf32 arithmetic, races, reads out of bounds in what
a run does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kvlens.kernels import merge, page_attend, page_scores, span_routes, turned_reads
from kvlens.kernels.page_attend import Pages
from kvlens.lab.gpu import drawn, exact_checks
from kvlens.lab.gpu.failures import sentence
from kvlens.lab.gpu.floors import PAGE
from kvlens.lab.gpu.kernels import lowrank_spans
from kvlens.lab.gpu.kernels.lowrank_spans import Spans
from kvlens.lab.gpu.part import Bench, Part
from kvlens.lab.results.gpu import CheckRow


@dataclass(frozen=True)
class Kind:
    """A type of keys and values, and the relative error that its arithmetic is allowed."""

    name: str
    dtype: torch.dtype
    tolerance: float


KINDS = (
    Kind("bf16", torch.bfloat16, 1e-2),  # results are rounded to 2^-9
    Kind("fp16", torch.float16, 2e-3),  # to 2^-11
    # No kernel uses one TF32 product in fp32, which errs by 5e-4: products are IEEE's, and k3's scores three TF32
    # products each (tf32x3), which err by 2^-21.
    Kind("fp32", torch.float32, 2e-5),
)
MASS = 1e-3
"""a masses' sum may differ from 1 by this"""
HEADS, GROUP, DIM = exact_checks.HEADS, exact_checks.GROUP, exact_checks.DIM


def measure(bench: Bench) -> Iterator[CheckRow]:
    """A kernel that cannot be run is a failed check, and the others go on."""
    torch.manual_seed(0)
    ways: list[exact_checks.Way] = [
        (f"{check.__name__}, {kind.name}", partial(check, bench, kind)) for kind in KINDS for check in CHECKS
    ]
    for name, way in ways + exact_checks.ways(bench):
        try:
            yield from way()
        except Exception as problem:
            if not bench.device.alive():
                raise
            yield CheckRow(f"{name.strip('_')}: {sentence(problem, 'free memory of the device')[0]}", -1.0, 0.0, False)


def near(name: str, values: torch.Tensor, exact: torch.Tensor, tolerance: float) -> CheckRow:
    """Norm of the difference over the norm of the exact result; not finite counts as failed."""
    wide = values.double().cpu()
    error = float((wide - exact).norm() / exact.norm())
    return CheckRow(name, error if error == error else -1.0, tolerance, error <= tolerance)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().cpu()


def _attend(bench: Bench, kind: Kind) -> Iterator[CheckRow]:
    for batch, places, biased in (
        ((1, 7, True), (2, 33, True), (1, 33, False)) if bench.dry else ((1, 7, True), (2, 102, True), (1, 1024, False))
    ):
        q, keys, values, pages = drawn.ragged_pages(bench, (HEADS, GROUP, DIM), batch, places, biased, kind.dtype)
        results = page_attend.page_attention(q, keys, values, pages, DIM**-0.5)
        tables = [
            x.cpu() if x is not None else None
            for x in (pages.table, pages.page_len, pages.n_page, pages.bias, pages.bias_row)
        ]
        exact = page_attend.page_attention(_wide(q), _wide(keys), _wide(values), Pages(*tables), DIM**-0.5)  # type: ignore[arg-type]
        assert results.mass is not None
        assert exact.mass is not None
        name = f"k1, {kind.name}, batch {batch}, {places} pages{', bias' if biased else ''}"
        yield near(f"{name}: output", results.output, exact.output, kind.tolerance)
        yield near(f"{name}: LSE", results.lse, exact.lse, kind.tolerance)
        yield near(f"{name}: masses", results.mass, exact.mass, kind.tolerance)
        gap = float((results.mass.double().sum(-1) - 1).abs().max())
        yield CheckRow(f"{name}: masses add up to 1", gap, MASS, gap <= MASS)


def _merge(bench: Bench, kind: Kind) -> Iterator[CheckRow]:
    parts, lses = torch.randn(2, 32, 17, DIM), torch.randn(2, 32, 17) * 5
    lses[0, 0, 3] = -torch.inf
    parts[0, 0, 3] = 0
    results, lse = merge.merge(parts.to(bench.device.at), lses.to(bench.device.at), kind.dtype)
    exact, exact_lse = merge.merge(parts.double(), lses.double(), torch.float64)
    yield near(f"merge, {kind.name}: output", results, exact, kind.tolerance)
    yield near(f"merge, {kind.name}: LSE", lse, exact_lse, kind.tolerance)


def _scores(bench: Bench, kind: Kind) -> Iterator[CheckRow]:
    places, live = (70, 66) if bench.dry else (1024, 1000)
    q, item, two = (
        bench.device.normal(*shape, dtype=kind.dtype)
        for shape in ((1, HEADS * GROUP, DIM), *[(1, HEADS, places, DIM)] * 2)
    )
    lo, hi = torch.minimum(item, two), torch.maximum(item, two)
    present = (torch.arange(places, device=bench.device.at) < live).expand(1, HEADS, -1)
    for pooling in page_scores.POOLINGS:
        scaling = DIM**-0.5
        results = page_scores.page_scores(q, lo, hi, present, pooling, scaling)[..., :live]
        exact = page_scores.page_scores(_wide(q), _wide(lo), _wide(hi), present.cpu(), pooling, scaling)[..., :live]
        yield near(f"k2 {pooling}, {kind.name}", results, exact, kind.tolerance)


def _spans(bench: Bench, kind: Kind) -> Iterator[CheckRow]:
    kv_heads, places, position = 2, 3, bench.device.at
    meta, flat, start = torch.zeros(1, kv_heads, places, 4, dtype=torch.int64), [], 0
    for place, (n, rank_k, rank_v) in enumerate(
        ((64, 16, 16), (37, 5, 12), (0, 0, 0), (128, 32, 7), (20, 1, 32), (64, 32, 32))
    ):
        meta.view(-1, 4)[place] = torch.tensor((start, n, rank_k, rank_v))
        size = (rank_k + rank_v) * (n + DIM + 1)
        flat.append(torch.randn(size) * 0.5)
        start += size
    buffer = torch.cat(flat).to(kind.dtype)
    spans, exact_spans = Spans(buffer.to(position), meta.to(position), 32), Spans(buffer.double(), meta, 32)
    q = bench.device.normal(1, kv_heads * GROUP, DIM, dtype=kind.dtype)
    reads = torch.rand(1, kv_heads * GROUP, places) < 0.7
    parts, lses = lowrank_spans.attend(q, spans, reads.to(position), DIM**-0.5)
    exact, exact_lses = lowrank_spans.attend(q.double().cpu(), exact_spans, reads, DIM**-0.5)
    read = exact_lses > -torch.inf
    yield near(f"k3 attend, {kind.name}: parts", parts, exact, kind.tolerance)
    yield near(f"k3 attend, {kind.name}: LSE", lses.cpu()[read], exact_lses[read], kind.tolerance)
    tiles = torch.tensor(
        [
            (place, first_item, i)
            for i, (place, first_item) in enumerate(((0, 0), (0, 32), (1, 0), (1, 32), (3, 96), (5, 32)))
        ]
    )
    slots = [
        torch.zeros(8, PAGE, kv_heads, DIM, dtype=dtype)
        for dtype in (kind.dtype, kind.dtype, torch.float64, torch.float64)
    ]
    views = [slot.transpose(1, 2) for slot in (slots[0].to(position), slots[1].to(position), slots[2], slots[3])]
    lowrank_spans.reconstruct(spans, tiles.to(position), views[0], views[1])
    lowrank_spans.reconstruct(exact_spans, tiles, views[2], views[3])
    yield near(f"k3 reconstruct, {kind.name}: keys", views[0], views[2], kind.tolerance)
    yield near(f"k3 reconstruct, {kind.name}: values", views[1], views[3], kind.tolerance)


def _turned(bench: Bench, kind: Kind) -> Iterator[CheckRow]:
    """Heads turn by half and more, so that no cosine is near tau."""
    spans, width = (70, 8) if bench.dry else (4098, 32)
    q, previous = (bench.device.normal(HEADS * GROUP, DIM, dtype=kind.dtype) for _ in range(2))
    previous[: HEADS * GROUP // 2] = q[: HEADS * GROUP // 2]
    wishes, selected = (torch.rand(HEADS, spans).argsort(1)[:, :width] for _ in range(2))
    tensors = [q, wishes.to(bench.device.at), previous, selected.to(bench.device.at)]
    exact = [x.cpu().clone() for x in tensors]
    q, wishes, previous, selected = tensors
    results = turned_reads.turned_reads(q, wishes, previous, selected, spans, 0.5, "mean")
    q, wishes, previous, selected = exact
    expected = turned_reads.turned_reads_torch(q, wishes, previous, selected, spans, 0.5, "mean")
    yield near(f"turned heads, {kind.name}: cosine", results.alike, expected.alike.double(), kind.tolerance)
    pairs = (("heads", results.now, expected.now), ("spans", results.fine, expected.fine))
    remembered = (("queries", tensors[2], exact[2]), ("wishes", tensors[3], exact[3]))
    for name, values, target in (*pairs, *remembered):
        yield exact_checks.same(f"turned heads, {kind.name}: {name}", values, target)


def _routes(bench: Bench, kind: Kind) -> Iterator[CheckRow]:
    """Thresholds lie in a gap of the scores, so that no rounding asks for another span."""
    rows, dim = (70, 8) if bench.dry else (2048, 32)
    q = bench.device.normal(HEADS * GROUP, DIM, dtype=kind.dtype)
    ids = torch.randperm(rows + 1)[:rows]
    for pool, each_head in (("max", False), ("mean", True)):
        weight = torch.randn(HEADS * (GROUP if each_head else 1), dim, DIM) * DIM**-0.5
        summary = torch.randn(HEADS * GROUP, rows, dim).to(kind.dtype)
        length = torch.randint(1, 65, (rows,)).float()
        exact = span_routes.RouteTable(weight, summary, length, ids, torch.zeros(HEADS * GROUP))
        scores = span_routes.scores_torch(_wide(q), exact)
        low, high = scores.sort(1).values[:, -rows // 4 : -rows // 8].unfold(1, 2, 1).unbind(-1)
        gap = (high - low).argmax(1, keepdim=True)
        exact = exact._replace(threshold=((low + high) / 2).gather(1, gap)[:, 0].float())
        ours = span_routes.RouteTable(*(x.to(bench.device.at) for x in exact))
        results = span_routes.routed(q, ours, HEADS, rows + 1, pool)
        expected = span_routes.routed_torch(_wide(q), exact, HEADS, rows + 1, pool)
        name = f"spans asked for, {kind.name}, {pool}"
        yield exact_checks.same(f"{name}: by query head", results.fine, expected.fine)
        wished = [
            torch.zeros(HEADS, rows + 2).scatter(1, x.cpu() + 1, 1.0)[:, 1:] for x in (results.wishes, expected.wishes)
        ]
        yield exact_checks.same(f"{name}: by KV head", *wished)


CHECKS = (_attend, _merge, _scores, _spans, _turned, _routes)
PART = Part(
    "checks",
    measure,
    ("kernel_checks.py", "exact_checks.py", "drawn.py"),
    "free the device's memory; this part takes about 1 GB",
)
