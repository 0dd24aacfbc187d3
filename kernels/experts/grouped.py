"""Products of rows that are sorted into groups, each group with a matrix of its own; the sizes of the groups stay on the device.

Groups are given by offsets_E1, int32: group e owns rows offsets[e] : offsets[e + 1]. As many programs run as the device can hold, and each
reads from the device how many tiles there are. Operands are read where they lie: a gather of rows happens in the load.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import launch

SCHEDULE_TILES = 128  # tiles that one program places
FEW_ROWS = 96  # groups of fewer rows waste more in tiles of 128 than those gain


@triton.jit
def _schedule_kernel(offsets_ptr, tiles_ptr, count_ptr, n_groups, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr):
    group = tl.arange(0, GROUPS)
    start = tl.load(offsets_ptr + group, mask=group < n_groups, other=0)
    end = tl.load(offsets_ptr + group + 1, mask=group < n_groups, other=0)
    count = tl.cdiv(end - start, BLOCK_M)
    last = tl.cumsum(count, 0)  # end of the group's tiles
    total = tl.sum(count, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    own = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)
    chosen = own[:, None] == group[None, :]
    row = tl.sum(tl.where(chosen, (start - (last - count) * BLOCK_M)[None, :], 0), 1) + tile * BLOCK_M
    stop = tl.sum(tl.where(chosen, end[None, :], 0), 1)
    tl.store(tiles_ptr + tile * 3, own, mask=tile < total)
    tl.store(tiles_ptr + tile * 3 + 1, row, mask=tile < total)
    tl.store(tiles_ptr + tile * 3 + 2, stop, mask=tile < total)
    tl.store(count_ptr, total)  # the same from every program


def schedule(offsets_E1: Tensor, rows: int, block_rows: int) -> tuple[Tensor, Tensor]:
    """Tiles of `block_rows` rows, none across two groups, and how many there are. int32 [bound, 3], [1]

    A tile is its group, its first row, and the end of the group's rows. The bound is the most tiles that groups of `rows` rows together
    can have; what lies beyond the count is left unwritten.
    """
    groups = len(offsets_E1) - 1
    bound = rows // block_rows + min(groups, rows)
    tiles = torch.empty(bound, 3, dtype=torch.int32, device=offsets_E1.device)
    count = torch.empty(1, dtype=torch.int32, device=offsets_E1.device)
    _schedule_kernel[(max(1, triton.cdiv(bound, SCHEDULE_TILES)),)](offsets_E1, tiles, count, groups, BLOCK_M=block_rows,
                                                                    GROUPS=triton.next_power_of_2(groups), TILES=SCHEDULE_TILES)
    return tiles, count


@triton.jit
def row_tile(tiles_ptr, tile, BLOCK_M: tl.constexpr):
    """Group (64-bit), rows, and end of the group's rows of a tile."""
    group = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    row = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_M)
    return group, row, tl.load(tiles_ptr + tile * 3 + 2)


@triton.jit
def swizzle(work, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """Tile (m, n) of a piece of work: GROUP_M rows of tiles at a time, so that what runs together shares operands in the L2 cache."""
    first = work // (GROUP_M * n_tiles) * GROUP_M
    height = tl.minimum(m_tiles - first, GROUP_M)
    place = work % (GROUP_M * n_tiles)
    return first + place % height, place // height


@triton.jit
def tile_product(a_ptr, b_ptr, rows, columns, size, stride_a, stride_bk, stride_bn, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Rows of a [.., K] times columns of b [K, ..], accumulated in fp32. [len(rows), len(columns)]"""
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * stride_a + k[None, :]
    b_ptrs = b_ptr + k[:, None] * stride_bk + columns[None, :] * stride_bn
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, size, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=k[None, :] < size - start, other=0)
            b = tl.load(b_ptrs, mask=k[:, None] < size - start, other=0)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_bk
    return total


@triton.jit
def operand_rows(gather_ptr, row, stop, GATHER: tl.constexpr):
    """Where the rows of a tile lie in the left operand; those from `stop` on repeat another, their results are not stored."""
    return tl.load(gather_ptr + row, mask=row < stop, other=0) if GATHER else tl.minimum(row, stop - 1)


@triton.jit
def _rows_kernel(a_ptr, gather_ptr, b_ptr, out_ptr, tiles_ptr, count_ptr, n, k, stride_be, stride_bk, stride_bn,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
                 GATHER: tl.constexpr):
    m_tiles, n_tiles = tl.load(count_ptr), tl.cdiv(n, BLOCK_N)
    for work in range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0)):
        tile, column_tile = swizzle(work, m_tiles, n_tiles, GROUP_M)
        group, row, stop = row_tile(tiles_ptr, tile, BLOCK_M)
        column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tile_product(a_ptr, b_ptr + group * stride_be, operand_rows(gather_ptr, row, stop, GATHER), column % n,
                             k, k, stride_bk, stride_bn, BLOCK_K, EVEN_K)
        out_ptrs = out_ptr + row.to(tl.int64)[:, None] * n + column[None, :]
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=(row < stop)[:, None] & (column < n)[None, :])


@triton.jit
def _groups_kernel(a_ptr, a_gather_ptr, b_ptr, b_gather_ptr, out_ptr, offsets_ptr, m, n,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
                   GATHER_A: tl.constexpr, GATHER_B: tl.constexpr):
    """aᵀ b over the rows of one group; zeros for a group without rows."""
    group = tl.program_id(1)
    m_tile, n_tile = swizzle(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
    m_offset = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n_offset = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    a_ptrs = a_ptr + (m_offset % m)[None, :]
    b_ptrs = b_ptr + (n_offset % n)[None, :]
    start = tl.load(offsets_ptr + group)
    stop = tl.load(offsets_ptr + group + 1)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(start, stop, BLOCK_K):
        row = first + tl.arange(0, BLOCK_K)
        exists = row < stop
        a_row, b_row = row, row
        if GATHER_A:
            a_row = tl.load(a_gather_ptr + row, mask=exists, other=0)
        if GATHER_B:
            b_row = tl.load(b_gather_ptr + row, mask=exists, other=0)
        # Both operands: beyond the group anything may lie, and 0 times NaN is NaN.
        a = tl.load(a_ptrs + a_row.to(tl.int64)[:, None] * m, mask=exists[:, None], other=0)
        b = tl.load(b_ptrs + b_row.to(tl.int64)[:, None] * n, mask=exists[:, None], other=0)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
    out_ptrs = out_ptr + group.to(tl.int64) * m * n + m_offset.to(tl.int64)[:, None] * n + n_offset[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=(m_offset < m)[:, None] & (n_offset < n)[None, :])


def tiling(kernel: str, operand: Tensor, rows: int, groups: int, *widths: int) -> dict[str, Any]:
    """Tiles for `rows` rows of products: by whether the groups fill tiles of many rows on average.

    Small ones for fp32, and for operands that are read element by element because their widths are no multiples of 16.
    """
    small = operand.dtype == torch.float32 or any(width % 16 for width in widths)
    return launch.tiles("experts", kernel, operand.device, "small" if small else "few" if rows < FEW_ROWS * groups else "many")


def plan(kernel: str, operand: Tensor, offsets_E1: Tensor, rows: int, columns: int,
         depth: int) -> tuple[dict[str, Any], tuple[Tensor, Tensor], tuple[int]]:
    """Constants, schedule and grid of a kernel that loops over the tiles of products [rows, depth] times [depth, columns]."""
    tile = tiling(kernel, operand, rows, len(offsets_E1) - 1, columns, depth)
    tiles, count = schedule(offsets_E1, rows, tile["BLOCK_M"])
    most = len(tiles) * triton.cdiv(columns, tile["BLOCK_N"])
    grid = (min(most, tile.pop("RESIDENT") * launch.processors(operand.device)),)
    return tile | {"EVEN_K": depth % tile["BLOCK_K"] == 0}, (tiles, count), grid


def _rows(x: Tensor, gather_R: Tensor | None) -> int:
    return (x if gather_R is None else gather_R).shape[0]  # len() would fix the number in a compiled graph


@torch.library.custom_op("reedling::multiply_rows", mutates_args=())
def multiply_rows(a_XK: Tensor, b_EKN: Tensor, offsets_E1: Tensor, gather_R: Tensor | None = None) -> Tensor:
    """Row r of group e: a[gather[r]] @ b[e], or a[r] @ b[e] without gather; rows that no group owns are left unwritten. [R, N]

    :param a_XK: contiguous
    :param b_EKN: of any strides
    """
    k, n = b_EKN.shape[1:]
    rows = _rows(a_XK, gather_R)
    out_RN = a_XK.new_empty(rows, n)
    tile, tiles, grid = plan("_rows_kernel", a_XK, offsets_E1, rows, n, k)
    _rows_kernel[grid](a_XK, gather_R, b_EKN, out_RN, *tiles, n, k, *b_EKN.stride(), **tile, GATHER=gather_R is not None)
    return out_RN


@multiply_rows.register_fake
def _(a_XK: Tensor, b_EKN: Tensor, offsets_E1: Tensor, gather_R: Tensor | None = None) -> Tensor:
    return a_XK.new_empty(_rows(a_XK, gather_R), b_EKN.shape[2])


@torch.library.custom_op("reedling::multiply_groups", mutates_args=())
def multiply_groups(a_XM: Tensor, b_YN: Tensor, offsets_E1: Tensor, dtype: torch.dtype, a_gather_R: Tensor | None = None,
                    b_gather_R: Tensor | None = None) -> Tensor:
    """For each group the sum over its rows r of a[r]ᵀ b[r], accumulated in fp32 and rounded once to `dtype`. [E, M, N]

    :param a_XM: contiguous; row r is a[a_gather[r]] where that is given. The same for b_YN
    """
    groups, m, n = len(offsets_E1) - 1, a_XM.shape[1], b_YN.shape[1]
    out_EMN = a_XM.new_empty(groups, m, n, dtype=dtype)
    rows = _rows(b_YN, b_gather_R)
    tile = tiling("_groups_kernel", a_XM, rows, groups, m, n)
    grid = (triton.cdiv(m, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]), groups)
    _groups_kernel[grid](a_XM, a_gather_R, b_YN, b_gather_R, out_EMN, offsets_E1, m, n, **tile,
                         GATHER_A=a_gather_R is not None, GATHER_B=b_gather_R is not None)
    return out_EMN


@multiply_groups.register_fake
def _(a_XM: Tensor, b_YN: Tensor, offsets_E1: Tensor, dtype: torch.dtype, a_gather_R: Tensor | None = None,
      b_gather_R: Tensor | None = None) -> Tensor:
    return a_XM.new_empty(offsets_E1.shape[0] - 1, a_XM.shape[1], b_YN.shape[1], dtype=dtype)


@torch.library.custom_op("reedling::grouped_gemm", mutates_args=())
def _grouped_gemm_op(a_RK: Tensor, b_ENK: Tensor, offsets_E1: Tensor) -> Tensor:
    return _clear_tail(multiply_rows(a_RK, b_ENK.transpose(1, 2), offsets_E1), offsets_E1)


@_grouped_gemm_op.register_fake
def _(a_RK: Tensor, b_ENK: Tensor, offsets_E1: Tensor) -> Tensor:
    return a_RK.new_empty(a_RK.shape[0], b_ENK.shape[1])


def _clear_tail(x_RN: Tensor, offsets_E1: Tensor) -> Tensor:
    """Zeros in the rows that no group owns."""
    return x_RN.masked_fill(torch.arange(x_RN.shape[0], device=x_RN.device)[:, None] >= offsets_E1[-1], 0)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy_RN: Tensor) -> tuple[Tensor | None, ...]:
    a_RK, b_ENK, offsets_E1 = ctx.saved_tensors
    dy_RN = dy_RN.contiguous()
    da = _clear_tail(multiply_rows(dy_RN, b_ENK, offsets_E1), offsets_E1) if ctx.needs_input_grad[0] else None
    db = multiply_groups(dy_RN, a_RK, offsets_E1, b_ENK.dtype) if ctx.needs_input_grad[1] else None
    return da, db, None


_grouped_gemm_op.register_autograd(_backward, setup_context=_save)


def grouped_gemm(a_RK: Tensor, b_ENK: Tensor, offsets_E1: Tensor) -> Tensor:
    """a[r] @ b[e]ᵀ for every row r of group e, zeros for rows that no group owns. [R, N]

    :param offsets_E1: int32 [E + 1], on the device; group e owns rows offsets[e] : offsets[e + 1]
    """
    return _grouped_gemm_op(a_RK.contiguous(), b_ENK, offsets_E1)
