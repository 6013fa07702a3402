"""The two kernels of kernels/slot_tables.py: the bias of some slots, and the table of live pages. Shapes: as there."""

from __future__ import annotations

from kvlens.kernels.compat import jit, tl


@jit
def bias_of_slots(  # type: ignore[no-untyped-def]
    role_ptr,
    span_ptr,
    position_ptr,
    log_ptr,
    start_ptr,
    governed_ptr,
    hot_ptr,
    fine_ptr,
    tokens_ptr,
    bias_ptr,
    seen_ptr,
    count_ptr,
    slots,
    places,
    slot_h,
    hot_h,
    fine_h,
    fine_g,
    fine_s,
    tokens_h,
    tokens_g,
    tokens_s,
    G: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    SELECTS: tl.constexpr,
    PARTS: tl.constexpr,
    COARSE: tl.constexpr,
    RESIDENT: tl.constexpr,
    RECONSTRUCTED: tl.constexpr,
    FREE: tl.constexpr,
):
    """One program: BLOCK slots of a KV head, for all its query heads. Writes their bias, which of their pages are live,
    and how many."""
    h = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < slots
    address = h * slot_h + c
    role = tl.load(role_ptr + address, mask=inside, other=FREE).to(tl.int32)
    coarse = role == COARSE
    token = (role == RESIDENT) | (role == RECONSTRUCTED)
    # only these slots' span ids are addresses
    span = tl.load(span_ptr + address, mask=coarse | token, other=0).to(tl.int64)
    plain = tl.load(log_ptr + span, mask=coarse, other=0.0)
    plain = tl.where(role == FREE, float("-inf"), plain)
    if SELECTS:
        token = token & (tl.load(governed_ptr + span, mask=token, other=0) != 0)
        asks = coarse | token
        hot = tl.load(hot_ptr + h * hot_h + span, mask=asks, other=0) != 0
        if PARTS:
            offset = tl.load(position_ptr + address, mask=token, other=0) - tl.load(
                start_ptr + span, mask=token, other=0
            )
    alive = tl.zeros((BLOCK,), tl.int32)
    for g in tl.static_range(G):
        added = plain
        if SELECTS:
            fine = tl.load(fine_ptr + h * fine_h + g * fine_g + span * fine_s, mask=asks, other=0)
            read = hot & (fine != 0)
            hidden = coarse & read
            if PARTS:
                read = read & (
                    offset < tl.load(tokens_ptr + h * tokens_h + g * tokens_g + span * tokens_s, mask=token, other=0)
                )
            hidden = hidden | (token & ~read)
            added = tl.where(hidden, float("-inf"), plain)
        tl.store(bias_ptr + (h * G + g) * slots + c, added, mask=inside)
        alive = alive | (added > float("-inf")).to(tl.int32)
    live = tl.max(tl.reshape(alive, (BLOCK // P, P)), 1)
    j = tl.program_id(0) * (BLOCK // P) + tl.arange(0, BLOCK // P)
    tl.store(seen_ptr + h * places + j, live.to(tl.uint8), mask=j < places)
    tl.store(count_ptr + h * tl.num_programs(0) + tl.program_id(0), tl.sum(live, 0))


@jit
def table_of_pages(  # type: ignore[no-untyped-def]
    seen_ptr,
    count_ptr,
    table_ptr,
    len_ptr,
    n_page_ptr,
    row_ptr,
    slots,
    places,
    blocks,
    G: tl.constexpr,
    P: tl.constexpr,
    PER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK pages of a KV head. Live ones go behind those of the programs before it; the places of the
    table that no live page takes name page 0. Counts are of PER pages each, and BLOCK is a multiple of that."""
    h = tl.program_id(1).to(tl.int64)
    first_page = tl.program_id(0) * BLOCK
    total = tl.zeros((), tl.int32)
    earlier = tl.zeros((), tl.int32)
    for start in range(0, blocks, BLOCK):
        b = start + tl.arange(0, BLOCK)
        count = tl.load(count_ptr + h * blocks + b, mask=b < blocks, other=0)
        total += tl.sum(count, 0)
        earlier += tl.sum(tl.where(b * PER < first_page, count, 0), 0)
    j = first_page + tl.arange(0, BLOCK)
    live = tl.load(seen_ptr + h * places + j, mask=j < places, other=0).to(tl.int32)
    to = h * places + earlier + tl.cumsum(live, 0) - 1
    row = (h * G * slots).to(tl.int32)
    tl.store(table_ptr + to, j, mask=live != 0)
    tl.store(len_ptr + to, tl.minimum(slots - j * P, P), mask=live != 0)
    tl.store(row_ptr + to, row + j * P, mask=live != 0)
    rest = (j >= total) & (j < places)
    none = tl.zeros((BLOCK,), tl.int32)
    tl.store(table_ptr + h * places + j, none, mask=rest)
    tl.store(len_ptr + h * places + j, none + tl.minimum(slots, P), mask=rest)
    tl.store(row_ptr + h * places + j, none + row, mask=rest)
    if tl.program_id(0) == 0:
        tl.store(n_page_ptr + h, total)
