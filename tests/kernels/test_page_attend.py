"""k1 and the merge: the kernel against the float64 reference, the reference against plain loops."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from kvlens.kernels.merge import merge_torch, merge_triton
from kvlens.kernels.page_attend import PageAttention, Pages, page_attention, page_attention_torch, page_attention_triton

NOWHERE = 2**30
"""stands in table entries that must not be read"""


@dataclass(frozen=True)
class Case:
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pages: Pages
    scaling: float

    def reference(self) -> PageAttention:
        wide = (x.double() for x in (self.q, self.keys, self.values))
        return page_attention_torch(*wide, self.pages, self.scaling)

    def kernel(self, splits: int | None = None, mass: bool = True) -> PageAttention:
        return page_attention_triton(self.q, self.keys, self.values, self.pages, self.scaling, mass, splits)


def case(
    batch: int = 1,
    kv_heads: int = 2,
    group: int = 4,
    dim: int = 64,
    page: int = 16,
    places: int = 7,
    dtype: torch.dtype = torch.float32,
    layout: str = "HND",
    bias: str = "none",
    seed: int = 0,
) -> Case:
    """Ragged pages, ragged tables, NaN in every entry no table names, absurd numbers behind the ends of the tables."""
    g = torch.Generator().manual_seed(seed)
    slots = places * batch * kv_heads + 3
    q = torch.randn(batch, kv_heads * group, dim, generator=g).to(dtype)
    table = torch.stack([torch.randperm(slots - 3, generator=g)[:places] for _ in range(batch * kv_heads)]).view(
        batch, kv_heads, places
    )
    page_len = torch.randint(1, page + 1, table.shape, generator=g)
    page_len[torch.rand(table.shape, generator=g) < 0.5] = page
    n_page = torch.randint(1, places + 1, (batch, kv_heads), generator=g)
    n_page[0, 0] = places
    dead = torch.arange(places) >= n_page[..., None]
    stored = {
        "HND": (slots, kv_heads, page, dim),
        "NHD": (slots, page, kv_heads, dim),
        "one head": (slots, 1, page, dim),
    }[layout]
    memory = []
    for _ in range(2):
        whole = torch.full(stored, torch.nan, dtype=dtype)
        view = whole.transpose(1, 2) if layout == "NHD" else whole.expand(-1, kv_heads, -1, -1)
        for b, h, n in (~dead).nonzero().tolist():
            alive = int(page_len[b, h, n])
            view[table[b, h, n], h, :alive] = torch.randn(alive, dim, generator=g).to(dtype)
        memory.append(view)
    for name in (table, page_len):
        name[dead] = NOWHERE
    pages = Pages(table.int(), page_len.int(), n_page.int())
    if bias != "none":
        rows = 5
        logs = torch.randint(1, 200, (rows, group if bias == "per head" else 1, page), generator=g).float().log()
        logs[torch.rand(logs.shape, generator=g) < 0.2] = -math.inf
        logs = torch.cat([logs, torch.full_like(logs[:1], torch.nan)])
        row = torch.randint(-1, rows, table.shape, generator=g)
        row[dead] = NOWHERE
        pages = replace(pages, bias=logs, bias_row=row.int())
    return Case(q, memory[0], memory[1], pages, dim**-0.5)


def check(found: PageAttention, wanted: PageAttention, tolerance: float = 2e-5) -> None:
    assert found.mass is not None
    assert wanted.mass is not None
    torch.testing.assert_close(found.output.double(), wanted.output.double(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found.lse.double(), wanted.lse, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(found.mass.double(), wanted.mass, atol=2e-6, rtol=2e-5)
    read = (found.lse > -math.inf).double()
    torch.testing.assert_close(found.mass.double().sum(-1), read, atol=2e-6, rtol=0)


ROUNDING = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""half a unit in the last place of the output's type, relative; nothing else may be lost"""


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(("dim", "group"), [(32, 1), (64, 2), (128, 4), (256, 8)])
def test_head_sizes_groups_and_types(dim: int, group: int, dtype: torch.dtype) -> None:
    data = case(dim=dim, group=group, dtype=dtype, places=5, bias="per head")
    check(data.kernel(splits=2), data.reference(), ROUNDING[dtype])


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_group(group: int) -> None:
    data = case(group=group, kv_heads=1, dim=32, places=4, bias="per head")
    check(data.kernel(splits=2), data.reference())


@pytest.mark.parametrize("bias", ["none", "shared", "per head"])
@pytest.mark.parametrize("layout", ["HND", "NHD", "one head"])
def test_layouts_and_biases_of_several_sequences(layout: str, bias: str) -> None:
    data = case(batch=2, layout=layout, bias=bias, seed=1)
    check(data.kernel(), data.reference())


@pytest.mark.parametrize("page", [8, 16, 32, 64, 128])
def test_page_sizes(page: int) -> None:
    data = case(page=page, kv_heads=1, places=4, bias="shared", seed=2)
    check(data.kernel(splits=2), data.reference())


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 16, 33])
def test_any_number_of_splits_gives_the_same(splits: int) -> None:
    data = case(places=11, kv_heads=1, seed=3, bias="per head")
    check(data.kernel(splits=splits), data.reference())


def test_nothing_to_read() -> None:
    """A KV head without pages, a page nobody reads, and a query head that reads nothing at all."""
    data = case(bias="per head", seed=4)
    data.pages.n_page[0, 1] = 0
    assert data.pages.bias is not None
    assert data.pages.bias_row is not None
    data.pages.bias_row[0, 0] = torch.arange(7) % 5
    data.pages.bias[0] = -math.inf
    data.pages.bias[:5, 2] = -math.inf
    found = data.kernel(splits=3)
    check(found, data.reference())
    assert found.mass is not None
    assert (found.output[0, 4:] == 0).all()
    assert (found.output[0, 2] == 0).all()
    assert (found.lse[0, [2, 4, 5, 6, 7]] == -math.inf).all()
    assert (found.mass[0, :4, [0, 5]] == 0).all()


def test_the_mass_can_be_left_out() -> None:
    data = case(seed=5)
    bare = data.kernel(mass=False)
    assert bare.mass is None
    assert torch.equal(bare.output, data.kernel().output)
    assert torch.equal(bare.lse, data.kernel().lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stores_round_as_torch_does(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(6)
    parts, lses = torch.randn(1, 6, 3, 64, generator=g), torch.randn(1, 6, 3, generator=g)
    exact, _ = merge_triton(parts, lses, torch.float32)
    rounded, _ = merge_triton(parts, lses, dtype)
    assert torch.equal(rounded, exact.to(dtype))


def test_merging_parts_is_attending_all_at_once() -> None:
    """Forty parts of one softmax, some of them empty."""
    g = torch.Generator().manual_seed(7)
    scores, values = (
        torch.randn(2, 3, 40, 6, generator=g).double() * 5,
        torch.randn(2, 3, 40, 6, 32, generator=g).double(),
    )
    scores[:, :, 5:9] = -math.inf
    scores[1, 2] = -math.inf
    lses = scores.logsumexp(-1)
    parts = torch.einsum("bhsn,bhsnd->bhsd", scores.softmax(-1).nan_to_num(0), values)
    whole = torch.einsum("bhn,bhnd->bhd", scores.flatten(2).softmax(-1).nan_to_num(0), values.flatten(2, 3))
    out, lse = merge_torch(parts, lses, torch.float64)
    torch.testing.assert_close(out, whole)
    found, found_lse = merge_triton(parts.float(), lses.float(), torch.float32)
    torch.testing.assert_close(found.double(), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_lse.double(), lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", ["none", "shared", "per head"])
def test_the_reference_equals_plain_loops(bias: str) -> None:
    data = case(batch=2, group=3, dim=32, bias=bias, seed=8)
    wanted, p = data.reference(), data.pages
    assert wanted.mass is not None
    for b in range(2):
        for hq in range(6):
            h, g = divmod(hq, 3)
            scores, values, owner = [], [], []
            for n in range(int(p.n_page[b, h])):
                for t in range(int(p.page_len[b, h, n])):
                    s = float(data.keys[p.table[b, h, n], h, t].double() @ data.q[b, hq].double()) * data.scaling
                    if p.bias is not None and p.bias_row is not None and p.bias_row[b, h, n] >= 0:
                        s += float(p.bias[p.bias_row[b, h, n], g if p.bias.shape[1] > 1 else 0, t])
                    scores.append(s)
                    values.append(data.values[p.table[b, h, n], h, t].double())
                    owner.append(n)
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            torch.testing.assert_close(wanted.output[b, hq], weights @ torch.stack(values))
            masses = torch.zeros(7, dtype=torch.float64).index_add_(0, torch.tensor(owner), weights)
            torch.testing.assert_close(wanted.mass[b, hq], masses)
            assert float(wanted.lse[b, hq]) == pytest.approx(math.log(sum(math.exp(s) for s in scores)))


def test_cpu_tensors_take_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlens.kernels.page_attend.page_attention_triton", None)
    data = case()
    found = page_attention(data.q, data.keys, data.values, data.pages, data.scaling)
    check(found, data.reference())


def test_sizes_the_kernel_cannot_take_are_named() -> None:
    data = case(dim=48)
    with pytest.raises(ValueError, match="head_dim"):
        data.kernel()
