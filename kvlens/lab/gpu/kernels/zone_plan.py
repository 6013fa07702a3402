"""The recall of one layer's static step, planned in one launch: which wishes fit, what of them is there, which spans
give way, what each cell holds from now on and what its slots are called. Many cells take two launches more. The
reference is kernels/zone_torch.py, and what lies where is equal bit for bit; the kernels are in zone_kernel.py and
zone_cells.py. Shapes: kernels/zone_tables.py.
"""

from __future__ import annotations

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import next_power_of_two
from kvlens.kernels.zone_tables import Moves, Names, Source, Wishes, ZoneTables
from kvlens.kernels.zone_torch import zone_plan_torch
from kvlens.lab.gpu.kernels.zone_cells import count_free, fill_blocks
from kvlens.lab.gpu.kernels.zone_kernel import plan_zone
from kvlens.lab.gpu.kernels.zone_parts import reusable

BLOCK = 1024
"""wishes, spans or slots taken at a time"""
WARPS = 8
PROBES = 8
"""times that one pass over the spans decides between"""
_Moves = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def zone_plan(tables: ZoneTables, names: Names, wishes: Wishes, source: Source) -> Moves:
    """Plan one layer's recall; `tables` and `names` are written. CUDA tensors take Triton, others PyTorch."""
    return (zone_plan_triton if backend(wishes.requested) == "triton" else zone_plan_torch)(
        tables, names, wishes, source
    )


def zone_plan_triton(tables: ZoneTables, names: Names, wishes: Wishes, source: Source) -> Moves:
    """As `zone_plan_torch`, in one launch; one more where KV heads reuse alike, and two for many cells. It needs no
    number of rounds, and tables but `names` and `packed` that are contiguous."""
    unit, moved, rebuilt, came = _plan_zone(
        wishes.requested,
        wishes.read,
        source.lengths,
        source.starts,
        source.packed,
        wishes.fire,
        wishes.clock,
        tables.held,
        tables.stamp,
        tables.span,
        tables.offset,
        tables.live,
        names.position,
        names.span,
        names.role,
        names.is_hot,
        source.page,
        source.origin,
        source.unit_bytes,
        wishes.reuse,
        wishes.equal_reuse,
        list(names.roles),
    )
    return Moves(unit, moved, None, None) if source.packed is None else Moves(unit, moved, rebuilt, came)


# A custom operator, so that torch.compile takes it as one call.
@torch.library.custom_op(
    "kvlens::zone_plan",
    mutates_args=("held", "stamp", "span", "offset", "live", "position", "slot_span", "role", "is_hot"),
    schema=(
        "(Tensor requested, Tensor? read, Tensor lengths, Tensor starts, Tensor? packed, Tensor fire, Tensor clock, "
        "Tensor(a!) held,"
        " Tensor(b!) stamp, Tensor(c!) span, Tensor(d!) offset, Tensor(e!) live, Tensor(f!) position, "
        "Tensor(g!) slot_span, Tensor(h!) role,"
        " Tensor(i!) is_hot, int page, int origin, int unit_bytes, bool reuse, bool equal_reuse, int[] roles)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _plan_zone(
    requested: torch.Tensor,
    read: torch.Tensor | None,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    packed: torch.Tensor | None,
    fire: torch.Tensor,
    clock: torch.Tensor,
    held: torch.Tensor,
    stamp: torch.Tensor,
    span: torch.Tensor,
    offset: torch.Tensor,
    live: torch.Tensor,
    position: torch.Tensor,
    slot_span: torch.Tensor,
    role: torch.Tensor,
    is_hot: torch.Tensor,
    page: int,
    origin: int,
    unit_bytes: int,
    reuse: bool,
    equal_reuse: bool,
    roles: list[int],
) -> _Moves:
    """What `zone_plan_triton` is given, one by one -> what `Moves` has, empty for None."""
    heads, wishes = requested.shape
    spans, cells = held.shape[1], span.shape[1]
    requested, fire = requested.contiguous(), fire.contiguous()
    if read is not None:
        read = (read[:, :1] if read.stride(1) == 0 else read).contiguous()  # the same for a group: read once
    assert all(x.is_contiguous() for x in (held, stamp, span, offset, live, is_hot))
    assert position.stride() == slot_span.stride() == role.stride()
    ends, count = requested.new_empty(2, heads, wishes, dtype=torch.int32)
    kept_cells, total = held.new_empty(heads, spans, dtype=torch.int32), held.new_empty(heads, dtype=torch.int32)
    unit, moved = span.new_empty(heads, cells, dtype=torch.int32), span.new_empty(heads)
    rebuilt, came = (live.new_empty((heads, size) if packed is not None else (0,)) for size in (cells, spans))
    reusable_cells = span.new_empty(heads)
    flags = [x.view(torch.uint8) for x in (fire, live, is_hot, rebuilt, came)]
    arguments = (requested, read, lengths, flags[0], held)
    sizes = {
        "W": wishes,
        "S": spans,
        "M": cells,
        "G": 1 if read is None else read.shape[1],
        "R": 0 if read is None else read.shape[2],
    }
    fixed = {"P": page, "READ": read is not None, "B": BLOCK, "num_warps": WARPS, "enable_fp_fusion": True}
    if reuse and equal_reuse:
        reusable[(heads,)](*arguments, reusable_cells, **sizes, **fixed)
    names = next_power_of_two(page)
    per_block = max(1, BLOCK // names)
    blocks = -(-cells // per_block)
    strides = (0, 0) if packed is None else packed.stride()
    placed = {
        "H": heads,
        "P": page,
        "FACTORS": packed is not None,
        "RAW": roles[0],
        "FACTORED": roles[1],
        "FREE": roles[2],
        "STEPS": wishes.bit_length(),
        "BC": per_block,
        "PP": names,
    }
    zone = (span, offset, flags[1])
    plan_zone[(heads,)](
        *arguments,
        reusable_cells,
        starts,
        packed,
        clock,
        stamp,
        *zone,
        position,
        slot_span,
        role,
        flags[2],
        kept_cells,
        total,
        ends,
        count,
        unit,
        moved,
        flags[3],
        flags[4],
        *strides,
        position.stride(0),
        origin,
        unit_bytes,
        **sizes,
        **{**placed, **fixed},
        HP=next_power_of_two(heads),
        REUSE=2 if reuse and equal_reuse else int(reuse),
        T=PROBES,
        CELLS=blocks == 1,
    )
    if blocks > 1:
        freed = torch.empty(heads, blocks, dtype=torch.int32, device=held.device)
        size = {"S": spans, "M": cells, "num_warps": WARPS, "enable_fp_fusion": True}
        count_free[(blocks, heads)](kept_cells, *zone, freed, BC=per_block, **size)
        fill_blocks[(blocks, heads)](
            requested,
            starts,
            packed,
            *zone,
            position,
            slot_span,
            role,
            kept_cells,
            ends,
            count,
            unit,
            flags[3],
            flags[4],
            moved,
            freed,
            total,
            *strides,
            position.stride(0),
            origin,
            unit_bytes,
            W=wishes,
            BLOCKS=next_power_of_two(blocks),
            **size,
            **placed,
        )
    return unit, moved, rebuilt, came


@_plan_zone.register_fake
def _(
    requested: torch.Tensor,
    read: torch.Tensor | None,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    packed: torch.Tensor | None,
    fire: torch.Tensor,
    clock: torch.Tensor,
    held: torch.Tensor,
    stamp: torch.Tensor,
    span: torch.Tensor,
    offset: torch.Tensor,
    live: torch.Tensor,
    position: torch.Tensor,
    slot_span: torch.Tensor,
    role: torch.Tensor,
    is_hot: torch.Tensor,
    page: int,
    origin: int,
    unit_bytes: int,
    reuse: bool,
    equal_reuse: bool,
    roles: list[int],
) -> _Moves:
    heads, (_, spans), (_, cells) = len(requested), held.shape, span.shape
    rebuilt, came = (live.new_empty((heads, size) if packed is not None else (0,)) for size in (cells, spans))
    return span.new_empty(heads, cells, dtype=torch.int32), span.new_empty(heads), rebuilt, came
