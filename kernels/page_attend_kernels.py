"""The kernel of k1 (kernels/page_attend.py): one run of pages of a KV head, for the query heads of its group.

Shapes: as there.
"""

from __future__ import annotations

from kvlens.kernels.compat import jit, tl


@jit
def split(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    len_ptr,
    n_page_ptr,
    bias_ptr,
    bias_row_ptr,
    part_ptr,
    lse_ptr,
    page_lse_ptr,
    offset_ptr,
    scaling,
    places,
    q_b,
    q_h,
    k_slot,
    k_h,
    k_t,
    v_slot,
    v_h,
    v_t,
    bias_r,
    bias_g,
    HKV: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    PPB: tl.constexpr,
    BIAS: tl.constexpr,
    MASS: tl.constexpr,
    OFFSETS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One program: one (sequence, KV head) and a run of its pages, PPB pages at a time; the group's query heads are the
    rows of the products. Online softmax in base 2. Writes part [B, Hq, splits, D], its LSE, and the LSE of every
    page."""
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    N: tl.constexpr = PPB * P
    bh = tl.program_id(0).to(tl.int64)
    b = bh // HKV
    h = bh % HKV
    g = tl.arange(0, GP)
    real = g < G
    hq = h * G + g
    d = tl.arange(0, D)
    entry = tl.arange(0, N)
    t = entry % P
    n_page = tl.load(n_page_ptr + bh)
    if OFFSETS:
        k_ptr += tl.multiple_of(tl.load(offset_ptr + 2 * b), 16)
        v_ptr += tl.multiple_of(tl.load(offset_ptr + 2 * b + 1), 16)
    per = tl.cdiv(tl.cdiv(n_page, tl.num_programs(1)), PPB) * PPB
    start = tl.program_id(1) * per
    end = tl.minimum(start + per, n_page)
    q = tl.load(q_ptr + b * q_b + hq[:, None] * q_h + d[None, :], mask=real[:, None], other=0.0).to(COMPUTE)
    top = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    out = tl.zeros((GP, D), tl.float32)
    # the table is read an iteration ahead: keys and values whose address is known when an iteration begins are fetched
    # while earlier ones are multiplied, into as many buffers as there are stages less one
    first_place = start + entry // P
    next_slot = tl.load(table_ptr + bh * places + first_place, mask=first_place < end, other=0)
    next_len = tl.load(len_ptr + bh * places + first_place, mask=first_place < end, other=0)
    if BIAS:
        next_row = tl.load(bias_row_ptr + bh * places + first_place, mask=first_place < end, other=-1)
    for block_start in range(start, end, PPB):
        place = block_start + entry // P
        address = bh * places + place
        slot = next_slot.to(tl.int64)
        # a column is live when its page is in the table and the page has that entry; nothing else is an address
        live = t < next_len
        if BIAS:
            row = next_row.to(tl.int64)
        ahead = place + PPB < end
        next_slot = tl.load(table_ptr + address + PPB, mask=ahead, other=0)
        next_len = tl.load(len_ptr + address + PPB, mask=ahead, other=0)
        if BIAS:
            next_row = tl.load(bias_row_ptr + address + PPB, mask=ahead, other=-1)
        k = tl.load(
            k_ptr + (slot * k_slot + h * k_h + t * k_t)[:, None] + d[None, :], mask=live[:, None], other=0.0
        ).to(COMPUTE)
        # the scale is applied to the product, so q stays exact in bf16
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scaling * LOG2E)
        if BIAS:
            biased = (live & (row >= 0))[None, :] & real[:, None]
            s += LOG2E * tl.load(bias_ptr + (row * bias_r + t)[None, :] + g[:, None] * bias_g, mask=biased, other=0.0)
        s = tl.where(live[None, :], s, float("-inf"))
        if MASS:
            by_page = tl.reshape(s, (GP, PPB, P))
            page_top = tl.max(by_page, 2)
            page_top = tl.where(page_top == float("-inf"), 0.0, page_top)
            page_lse = (page_top + tl.log2(tl.sum(tl.exp2(by_page - page_top[:, :, None]), 2))) * LN2
            j = block_start + tl.arange(0, PPB)
            to = page_lse_ptr + (b * (HKV * G) + hq)[:, None] * places + j[None, :]
            tl.store(to, page_lse, mask=real[:, None] & (j < end)[None, :])
        new_top = tl.maximum(top, tl.max(s, 1))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - level)
        weight = tl.exp2(s - level[:, None])
        total = total * fade + tl.sum(weight, 1)
        v = tl.load(
            v_ptr + (slot * v_slot + h * v_h + t * v_t)[:, None] + d[None, :], mask=live[:, None], other=0.0
        ).to(COMPUTE)
        out = out * fade[:, None] + tl.dot(weight.to(COMPUTE), v, input_precision="ieee")
        top = new_top
    lse = tl.where(total > 0, (top + tl.log2(total)) * LN2, float("-inf"))
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    row = (b * (HKV * G) + hq) * tl.num_programs(1) + tl.program_id(1)
    tl.store(part_ptr + row[:, None] * D + d[None, :], out, mask=real[:, None])
    tl.store(lse_ptr + row, lse, mask=real)
