"""Attention on GPUs: tiles of queries pass over the keys that they see; the backward pass computes the weights again.

Three kernels: the forward pass and the gradient of q go over tiles of queries, those of k and v over tiles of keys, so that nothing is
added atomically. Which document a tile belongs to is searched for on the device, in grids that are as large as any documents may need.
Tiles of queries belong to one document. Tiles of keys go through all documents that see some of their keys, as ranges of keys may
overlap; there a query that is not finite reaches the gradients of other documents' keys in the same tile.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import launch

LOG2_E, LN_2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attention_triton(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor, segments_T: Tensor, keys_2U: Tensor | None,
                     causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    return documents_attention(q_TNH, k_SGH, v_SGH, None, *_bounds(cu_seqlens_U1, keys_2U), causal, scale, window)


def backward_triton(dout_TNH: Tensor, q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, out_TNH: Tensor, lse_NT: Tensor, cu_seqlens_U1: Tensor,
                    segments_T: Tensor, keys_2U: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    ranges = [t.int().contiguous() for t in _bounds(cu_seqlens_U1, keys_2U)]
    dq_TNH, dk_SGH, dv_SGH, _ = backward_op(dout_TNH, None, q_TNH, k_SGH, v_SGH, None, *ranges, out_TNH, lse_NT, causal, scale, None)
    return dq_TNH, dk_SGH, dv_SGH


def _bounds(cu_seqlens_U1: Tensor, keys_2U: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Starts and ends of the documents' queries and of their keys."""
    starts_U, ends_U = cu_seqlens_U1[:-1], cu_seqlens_U1[1:]
    key_starts_U, key_ends_U = (starts_U, ends_U) if keys_2U is None else keys_2U
    return starts_U, ends_U, key_starts_U, key_ends_U


def documents_attention(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, bias_NTR: Tensor | None, starts_U: Tensor, ends_U: Tensor,
                        key_starts_U: Tensor, key_ends_U: Tensor, causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """As kernels.attention, of documents with their ends; rows from an end to the next start, too, give 0 and -inf.

    :param bias_NTR: added to q kᵀ before the scale: that of row i and key i + d stands at R // 2 + d
    :param starts_U: int32 like the three others, and like them non-decreasing; starts_U[0] is 0
    """
    if q_TNH.dtype not in DTYPES:
        raise ValueError(f"implementation triton computes in {', '.join(map(str, DTYPES))}, not in {q_TNH.dtype}")
    if scale == 0:
        raise ValueError("scale 0: implementation triton needs another")
    ranges = [t.int().contiguous() for t in (starts_U, ends_U, key_starts_U, key_ends_U)]
    q_TNH = q_TNH if scale > 0 else -q_TNH  # the largest score is the largest product
    return forward_op(q_TNH, k_SGH, v_SGH, bias_NTR, *ranges, causal, abs(scale), window)


@triton.jit
def _count(sorted_ptr, size, limit):
    """How many of the non-decreasing numbers are at most `limit`."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if tl.load(sorted_ptr + middle) <= limit:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def _query_tile(tile, starts_ptr, ends_ptr, key_starts_ptr, key_ends_ptr, rows, documents, BLOCK_M: tl.constexpr):
    """Document of a tile: the tile's first row, the row before which it ends, the document's end, its first key and their end.

    Document u begins with tile starts[u] // BLOCK_M + u, which leaves room for all of its tiles; some tiles own no row.
    """
    low, high = 0, documents
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    start = tl.load(starts_ptr + low)
    first = start + (tile - start // BLOCK_M - low) * BLOCK_M
    stop = rows
    if low + 1 < documents:
        stop = tl.load(starts_ptr + low + 1)
    return first, stop, tl.load(ends_ptr + low), tl.load(key_starts_ptr + low), tl.load(key_ends_ptr + low)


@triton.jit
def _span(row, end, key_start, key_end, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """First and last key that a row sees, last < first for none; the document's last row sits at its last key."""
    diagonal = row + (key_end - end)
    first, last = key_start, key_end - 1
    if WINDOW:
        first = tl.maximum(first, diagonal - (WINDOW - 1))
        last = tl.minimum(last, diagonal + (WINDOW - 1))
    if CAUSAL:
        last = tl.minimum(last, diagonal)
    return first, tl.where(row < end, last, -1)


@triton.jit
def _key_loop(first_row, end, key_start, key_end, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """begin, clear, cut, stop: keys for a tile of rows, in blocks from `begin` on; those in clear : cut are seen by all of its rows."""
    last_row = tl.minimum(first_row + BLOCK_M, end) - 1
    begin, late = _span(first_row, end, key_start, key_end, CAUSAL, WINDOW)
    late_begin, stop = _span(last_row, end, key_start, key_end, CAUSAL, WINDOW)
    clear = begin + tl.cdiv(tl.maximum(late_begin - begin, 0), BLOCK_N) * BLOCK_N
    cut = clear + tl.maximum(late + 1 - clear, 0) // BLOCK_N * BLOCK_N
    stop = tl.where(first_row < end, stop + 1, begin)
    return begin, clear, cut, stop


@triton.jit
def _own_tile(starts_ptr, ends_ptr, key_starts_ptr, key_ends_ptr, rows, documents, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's tile of queries: its first row, the row before which it ends, the document's end; rows, _span of each, _key_loop."""
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # long ones first: late rows see more keys
    first_row, next_start, end, key_start, key_end = _query_tile(tile, starts_ptr, ends_ptr, key_starts_ptr, key_ends_ptr, rows, documents,
                                                                 BLOCK_M)
    row = first_row + tl.arange(0, BLOCK_M)
    first, last = _span(row, end, key_start, key_end, CAUSAL, WINDOW)
    begin, clear, cut, stop = _key_loop(first_row, end, key_start, key_end, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    return first_row, next_start, end, row, first, last, begin, clear, cut, stop


@triton.jit
def _load_rows(ptr, first, stop, stride, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Rows first : first + ROWS of one head [ROWS, WIDTH], zeros from row `stop` and column SIZE on."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = ptr + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :])
    if MASKED and SIZE < WIDTH:
        return tl.load(pointers, (row < stop - first)[:, None] & (column < SIZE)[None, :], 0)
    elif MASKED:
        return tl.load(pointers, (row < stop - first)[:, None], 0)
    elif SIZE < WIDTH:
        return tl.load(pointers, (column < SIZE)[None, :], 0)
    return tl.load(pointers)


@triton.jit
def _store_rows(ptr, values, first, stop, stride, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = ptr + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :])
    tl.store(pointers, values.to(ptr.dtype.element_ty), (row < stop - first)[:, None] & (column < SIZE)[None, :])


@triton.jit
def _bias_places(ptr, row, key, width):
    """Pointers to the bias of rows and keys that broadcast, and whether there is one; `ptr` is that of the row 0."""
    place = width // 2 + key - row
    return ptr + tl.cast(row, tl.int64) * width + place, (place >= 0) & (place < width)


@triton.jit
def _forward_keys(acc, most, total, q, k_ptr, v_ptr, bias_ptr, row, first, last, begin, stop, k_stride, v_stride, bias_width, scale,
                  SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """Goes on over the keys begin : stop; `most` is the largest product yet, `total` the sum of 2^(scale (product - most))."""
    for n in range(begin, stop, BLOCK_N):
        k = _load_rows(k_ptr, n, stop, k_stride, SIZE, BLOCK_N, WIDTH, MASKED)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        key = n + tl.arange(0, BLOCK_N)
        sees = (key[None, :] >= first[:, None]) & (key[None, :] <= last[:, None])
        if bias_ptr is not None:
            pointers, exists = _bias_places(bias_ptr, row[:, None], key[None, :], bias_width)
            products += tl.load(pointers, sees & exists, 0).to(tl.float32)
        if MASKED:
            products = tl.where(sees, products, float("-inf"))
        largest = tl.maximum(most, tl.max(products, 1))
        anchor = tl.where(largest == float("-inf"), 0.0, largest) if MASKED else largest  # rows that saw nothing yet
        weights = tl.exp2(products * scale - (anchor * scale)[:, None])
        shrink = tl.exp2((most - anchor) * scale)
        total = total * shrink + tl.sum(weights, 1)
        v = _load_rows(v_ptr, n, stop, v_stride, SIZE, BLOCK_N, WIDTH, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        most = largest
    return acc, most, total


@triton.jit
def _forward_kernel(q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, lse_ptr, starts_ptr, ends_ptr, key_starts_ptr, key_ends_ptr, rows, documents,
                    bias_width, q_row, q_head, k_row, k_head, v_row, v_head, scale, SHARE: tl.constexpr, SIZE: tl.constexpr,
                    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    first_row, next_start, end, row, first, last, begin, clear, cut, stop = _own_tile(
        starts_ptr, ends_ptr, key_starts_ptr, key_ends_ptr, rows, documents, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    if first_row >= next_start:
        return
    q = _load_rows(q_ptr + head * q_head, first_row, end, q_row, SIZE, BLOCK_M, WIDTH, True)
    k_ptr += (head // SHARE) * k_head
    v_ptr += (head // SHARE) * v_head
    if bias_ptr is not None:
        bias_ptr += head * rows * bias_width
    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if WINDOW:
        acc, most, total = _forward_keys(acc, most, total, q, k_ptr, v_ptr, bias_ptr, row, first, last, begin, tl.minimum(clear, stop),
                                         k_row, v_row, bias_width, scale, SIZE, WIDTH, BLOCK_N, True)
    acc, most, total = _forward_keys(acc, most, total, q, k_ptr, v_ptr, bias_ptr, row, first, last, clear, cut, k_row, v_row,
                                     bias_width, scale, SIZE, WIDTH, BLOCK_N, False)
    acc, most, total = _forward_keys(acc, most, total, q, k_ptr, v_ptr, bias_ptr, row, first, last, cut, stop, k_row, v_row,
                                     bias_width, scale, SIZE, WIDTH, BLOCK_N, True)
    sighted = (total > 0) & (row < end)
    out = tl.where(sighted[:, None], acc / total[:, None], 0.0)
    _store_rows(out_ptr + head * SIZE, out, first_row, next_start, tl.num_programs(0) * SIZE, SIZE, BLOCK_M, WIDTH)
    lse = tl.where(sighted, (most * scale + tl.log2(total)) * LN_2, float("-inf"))
    tl.store(lse_ptr + head * rows + row, lse, row < next_start)


@triton.jit
def _row_products(a_ptr, b_ptr, first, stop, a_stride, b_stride, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Sum of a * b of each row; some columns at a time, which takes fewer registers."""
    total = tl.zeros((ROWS,), tl.float32)
    for column in tl.static_range(0, SIZE, 32):
        a = _load_rows(a_ptr + column, first, stop, a_stride, SIZE - column, ROWS, 32, True)
        b = _load_rows(b_ptr + column, first, stop, b_stride, SIZE - column, ROWS, 32, True)
        total += tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)
    return total


@triton.jit
def _query_keys(dq, q, dout, lse, delta, k_ptr, v_ptr, bias_ptr, dbias_ptr, row, first, last, begin, stop, k_stride, v_stride, bias_width,
                scale, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """Gradient of q, without its last factor, from the keys begin : stop; writes the gradient of the bias."""
    for n in range(begin, stop, BLOCK_N):
        k = _load_rows(k_ptr, n, stop, k_stride, SIZE, BLOCK_N, WIDTH, MASKED)
        v = _load_rows(v_ptr, n, stop, v_stride, SIZE, BLOCK_N, WIDTH, MASKED)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        key = n + tl.arange(0, BLOCK_N)
        sees = (key[None, :] >= first[:, None]) & (key[None, :] <= last[:, None])
        if bias_ptr is not None:
            pointers, exists = _bias_places(bias_ptr, row[:, None], key[None, :], bias_width)
            products += tl.load(pointers, sees & exists, 0).to(tl.float32)
        weights = tl.exp2(products * scale - lse[:, None])
        if MASKED:
            weights = tl.where(sees, weights, 0.0)
        dweights = tl.dot(dout, tl.trans(v), input_precision="ieee")
        dproducts = weights * (dweights - delta[:, None])
        dq = tl.dot(dproducts.to(k.dtype), k, dq, input_precision="ieee")
        if bias_ptr is not None:
            pointers, exists = _bias_places(dbias_ptr, row[:, None], key[None, :], bias_width)
            tl.store(pointers, (dproducts * (scale * LN_2)).to(dbias_ptr.dtype.element_ty), sees & exists)
    return dq


@triton.jit
def _query_kernel(dout_ptr, dlse_ptr, q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, lse_ptr, dq_ptr, dbias_ptr, delta_ptr, starts_ptr, ends_ptr,
                  key_starts_ptr, key_ends_ptr, rows, documents, bias_width, dout_row, dout_head, q_row, q_head, k_row, k_head, v_row,
                  v_head, scale, SHARE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Gradient of q; also writes delta = dout . out - dlse, which the gradients of k and v need."""
    head = tl.program_id(0).to(tl.int64)
    first_row, next_start, end, row, first, last, begin, clear, cut, stop = _own_tile(
        starts_ptr, ends_ptr, key_starts_ptr, key_ends_ptr, rows, documents, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    if first_row >= next_start:
        return
    q = _load_rows(q_ptr + head * q_head, first_row, end, q_row, SIZE, BLOCK_M, WIDTH, True)
    dout = _load_rows(dout_ptr + head * dout_head, first_row, end, dout_row, SIZE, BLOCK_M, WIDTH, True)
    delta = _row_products(dout_ptr + head * dout_head, out_ptr + head * SIZE, first_row, end, dout_row, tl.num_programs(0) * SIZE, SIZE,
                          BLOCK_M)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + head * rows + row, row < end, 0)
    tl.store(delta_ptr + head * rows + row, delta, row < end)
    lse = tl.load(lse_ptr + head * rows + row, row < end, float("inf")) * LOG2_E
    k_ptr += (head // SHARE) * k_head
    v_ptr += (head // SHARE) * v_head
    if bias_ptr is not None:
        bias_ptr += head * rows * bias_width
        dbias_ptr += head * rows * bias_width
    dq = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    if WINDOW:
        dq = _query_keys(dq, q, dout, lse, delta, k_ptr, v_ptr, bias_ptr, dbias_ptr, row, first, last, begin, tl.minimum(clear, stop),
                         k_row, v_row, bias_width, scale, SIZE, WIDTH, BLOCK_N, True)
    dq = _query_keys(dq, q, dout, lse, delta, k_ptr, v_ptr, bias_ptr, dbias_ptr, row, first, last, clear, cut, k_row, v_row, bias_width,
                     scale, SIZE, WIDTH, BLOCK_N, False)
    dq = _query_keys(dq, q, dout, lse, delta, k_ptr, v_ptr, bias_ptr, dbias_ptr, row, first, last, cut, stop, k_row, v_row, bias_width,
                     scale, SIZE, WIDTH, BLOCK_N, True)
    dq = tl.where((row < end)[:, None], dq * (scale * LN_2), 0.0)
    _store_rows(dq_ptr + head * SIZE, dq, first_row, next_start, tl.num_programs(0) * SIZE, SIZE, BLOCK_M, WIDTH)


@triton.jit
def _key_rows(dk, dv, k, v, key, first_head, q_ptr, dout_ptr, bias_ptr, lse_ptr, delta_ptr, begin, stop, end, key_start, key_end, rows,
              bias_width, q_row, q_head, dout_row, dout_head, scale, HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
              CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr):
    """Gradients of k and v, the former without its last factor, from the rows begin : stop of HEADS heads."""
    blocks = tl.cdiv(tl.maximum(stop - begin, 0), BLOCK_M)
    for i in range(0, blocks * HEADS):
        head = first_head + i // blocks
        first_row = begin + i % blocks * BLOCK_M
        row = first_row + tl.arange(0, BLOCK_M)
        q = _load_rows(q_ptr + head * q_head, first_row, end, q_row, SIZE, BLOCK_M, WIDTH, True)
        dout = _load_rows(dout_ptr + head * dout_head, first_row, end, dout_row, SIZE, BLOCK_M, WIDTH, True)
        lse = tl.load(lse_ptr + head * rows + row, row < end, float("inf")) * LOG2_E
        delta = tl.load(delta_ptr + head * rows + row, row < end, 0)
        products = tl.dot(k, tl.trans(q), input_precision="ieee")
        first, last = _span(row, end, key_start, key_end, CAUSAL, WINDOW)
        sees = (key[:, None] >= first[None, :]) & (key[:, None] <= last[None, :])
        if bias_ptr is not None:
            pointers, exists = _bias_places(bias_ptr + head * rows * bias_width, row[None, :], key[:, None], bias_width)
            products += tl.load(pointers, sees & exists, 0).to(tl.float32)
        weights = tl.exp2(products * scale - lse[None, :])
        if MASKED:
            weights = tl.where(sees, weights, 0.0)
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")
        dproducts = weights * (tl.dot(v, tl.trans(dout), input_precision="ieee") - delta[None, :])
        if MASKED:
            dproducts = tl.where(sees, dproducts, 0.0)  # v of another document may be no number
        dk = tl.dot(dproducts.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _key_kernel(dout_ptr, q_ptr, k_ptr, v_ptr, bias_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, starts_ptr, ends_ptr, key_starts_ptr,
                key_ends_ptr, rows, keys, documents, bias_width, dout_row, dout_head, q_row, q_head, k_row, k_head, v_row, v_head, scale,
                SHARE: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
                WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Gradients of a tile of k and v from HEADS of the heads that share them and from all documents that see some of its keys."""
    first_head = tl.program_id(0).to(tl.int64) * HEADS
    group, part = first_head // SHARE, first_head % SHARE // HEADS
    tile_begin = tl.program_id(1) * BLOCK_N
    tile_end = tile_begin + BLOCK_N
    key = tile_begin + tl.arange(0, BLOCK_N)
    k = _load_rows(k_ptr + group * k_head, tile_begin, keys, k_row, SIZE, BLOCK_N, WIDTH, True)
    v = _load_rows(v_ptr + group * v_head, tile_begin, keys, v_row, SIZE, BLOCK_N, WIDTH, True)
    dk = tl.zeros((BLOCK_N, WIDTH), tl.float32)
    dv = tl.zeros((BLOCK_N, WIDTH), tl.float32)
    seen = tl.minimum(tile_end, tl.load(key_ends_ptr + documents - 1))  # leaves out empty documents behind the last
    for u in range(_count(key_ends_ptr, documents, tile_begin), _count(key_starts_ptr, documents, seen - 1)):
        start, end = tl.load(starts_ptr + u), tl.load(ends_ptr + u)
        key_start, key_end = tl.load(key_starts_ptr + u), tl.load(key_ends_ptr + u)
        begin, clear, cut, stop = _row_loop(tile_begin, tile_end, start, end, key_start, key_end, CAUSAL, WINDOW, BLOCK_M)
        dk, dv = _key_rows(dk, dv, k, v, key, first_head, q_ptr, dout_ptr, bias_ptr, lse_ptr, delta_ptr, begin, tl.minimum(clear, stop),
                           end, key_start, key_end, rows, bias_width, q_row, q_head, dout_row, dout_head, scale, HEADS, SIZE, WIDTH,
                           CAUSAL, WINDOW, BLOCK_M, True)
        dk, dv = _key_rows(dk, dv, k, v, key, first_head, q_ptr, dout_ptr, bias_ptr, lse_ptr, delta_ptr, clear, cut, end, key_start,
                           key_end, rows, bias_width, q_row, q_head, dout_row, dout_head, scale, HEADS, SIZE, WIDTH, CAUSAL, WINDOW,
                           BLOCK_M, False)
        if WINDOW:
            dk, dv = _key_rows(dk, dv, k, v, key, first_head, q_ptr, dout_ptr, bias_ptr, lse_ptr, delta_ptr, cut, stop, end, key_start,
                               key_end, rows, bias_width, q_row, q_head, dout_row, dout_head, scale, HEADS, SIZE, WIDTH, CAUSAL, WINDOW,
                               BLOCK_M, True)
    groups = tl.num_programs(0) * HEADS // SHARE
    place = (part * keys * groups + group) * SIZE
    _store_rows(dk_ptr + place, dk * (scale * LN_2), tile_begin, keys, groups * SIZE, SIZE, BLOCK_N, WIDTH)
    _store_rows(dv_ptr + place, dv, tile_begin, keys, groups * SIZE, SIZE, BLOCK_N, WIDTH)


@triton.jit
def _row_loop(tile_begin, tile_end, start, end, key_start, key_end, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr):
    """begin, clear, cut, stop: rows for a tile of keys, in blocks from `begin` on; those in clear : cut see all of its keys.

    Rows from the document's end on may be among the latter: their weights are 0, as the logarithm of their sum is infinite.
    """
    to_row = end - key_end  # from the key that a row sits at
    begin, stop = start, end
    clear_begin, clear_stop = start, end + BLOCK_M - 1
    if CAUSAL:
        begin = tl.maximum(begin, tl.maximum(tile_begin, key_start) + to_row)
        clear_begin = tl.maximum(clear_begin, tile_end - 1 + to_row)
    if WINDOW:
        stop = tl.minimum(stop, tl.minimum(tile_end, key_end) + WINDOW - 1 + to_row)
        clear_stop = tl.minimum(end, tile_begin + WINDOW + to_row)
        if not CAUSAL:
            begin = tl.maximum(begin, tl.maximum(tile_begin, key_start) - (WINDOW - 1) + to_row)
            clear_begin = tl.maximum(clear_begin, tile_end - WINDOW + to_row)
    clear = begin + tl.cdiv(tl.maximum(clear_begin - begin, 0), BLOCK_M) * BLOCK_M
    if (tile_begin < key_start) | (tile_end > key_end):
        clear = tl.maximum(clear, begin + tl.cdiv(tl.maximum(stop - begin, 0), BLOCK_M) * BLOCK_M)
    return begin, clear, clear + tl.maximum(clear_stop - clear, 0) // BLOCK_M * BLOCK_M, stop


@torch.library.custom_op("reedling::attention_triton", mutates_args=())
def forward_op(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, bias_NTR: Tensor | None, starts_U: Tensor, ends_U: Tensor,
               key_starts_U: Tensor, key_ends_U: Tensor, causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """`scale` is positive."""
    rows, heads = q_TNH.shape[:2]
    out_TNH, lse_NT = torch.empty_like(q_TNH, memory_format=torch.contiguous_format), q_TNH.new_empty((heads, rows), dtype=torch.float32)
    q_TNH, k_SGH, v_SGH = map(launch.whole_rows, (q_TNH, k_SGH, v_SGH))
    tiles = _tiles("_forward_kernel", q_TNH, bias_NTR)
    _forward_kernel[(heads, _query_tiles(rows, starts_U, tiles))](
        q_TNH, k_SGH, v_SGH, bias_NTR, out_TNH, lse_NT, starts_U, ends_U, key_starts_U, key_ends_U, rows, len(starts_U),
        _width(bias_NTR), *q_TNH.stride()[:2], *k_SGH.stride()[:2], *v_SGH.stride()[:2], scale * LOG2_E.value,
        **_constants(q_TNH, k_SGH, causal, window), **tiles)
    return out_TNH, lse_NT


@torch.library.custom_op("reedling::attention_triton_backward", mutates_args=())
def backward_op(dout_TNH: Tensor, dlse_NT: Tensor | None, q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, bias_NTR: Tensor | None,
                starts_U: Tensor, ends_U: Tensor, key_starts_U: Tensor, key_ends_U: Tensor, out_TNH: Tensor, lse_NT: Tensor, causal: bool,
                scale: float, window: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the bias, the last of which is empty without a bias."""
    rows, heads = q_TNH.shape[:2]
    keys, groups = k_SGH.shape[:2]
    dout_TNH, q_TNH, k_SGH, v_SGH = map(launch.whole_rows, (dout_TNH, q_TNH, k_SGH, v_SGH))
    dlse_NT = None if dlse_NT is None else dlse_NT.contiguous()
    strides = [stride for t in (dout_TNH, q_TNH, k_SGH, v_SGH) for stride in t.stride()[:2]]
    ranges, constants = (starts_U, ends_U, key_starts_U, key_ends_U), _constants(q_TNH, k_SGH, causal, window)
    dq_TNH, delta_NT = q_TNH.new_empty(q_TNH.shape), torch.empty_like(lse_NT)
    dbias_NTR = q_TNH.new_empty(0) if bias_NTR is None else torch.zeros_like(bias_NTR)
    tiles = _tiles("_query_kernel", q_TNH, bias_NTR)
    _query_kernel[(heads, _query_tiles(rows, starts_U, tiles))](
        dout_TNH, dlse_NT, q_TNH, k_SGH, v_SGH, bias_NTR, out_TNH, lse_NT, dq_TNH, None if bias_NTR is None else dbias_NTR, delta_NT,
        *ranges, rows, len(starts_U), _width(bias_NTR), *strides, scale * LOG2_E.value, **constants, **tiles)
    tiles = _tiles("_key_kernel", q_TNH, bias_NTR)
    key_tiles = triton.cdiv(keys, tiles["BLOCK_N"])
    parts = _parts(heads // groups, key_tiles * groups, 4 * launch.processors(q_TNH.device))
    dk_PSGH, dv_PSGH = (t.new_empty((parts, *t.shape), dtype=t.dtype if parts == 1 else torch.float32) for t in (k_SGH, v_SGH))
    _key_kernel[(groups * parts, key_tiles)](
        dout_TNH, q_TNH, k_SGH, v_SGH, bias_NTR, lse_NT, delta_NT, dk_PSGH, dv_PSGH, *ranges, rows, keys, len(starts_U), _width(bias_NTR),
        *strides, scale * LOG2_E.value, HEADS=heads // groups // parts, **constants, **tiles)
    dk_SGH, dv_SGH = (t[0] if parts == 1 else t.sum(0).to(q_TNH.dtype) for t in (dk_PSGH, dv_PSGH))
    return dq_TNH, dk_SGH, dv_SGH, dbias_NTR


def _width(bias_NTR: Tensor | None) -> int:
    return 0 if bias_NTR is None else bias_NTR.shape[-1]


def _tiles(kernel: str, q_TNH: Tensor, bias_NTR: Tensor | None) -> dict[str, Any]:
    width = str(max(64, triton.next_power_of_2(q_TNH.shape[-1])))
    shape = width + (" biased" if bias_NTR is not None else "") + (" fp32" if q_TNH.dtype == torch.float32 else "")
    return launch.tiles("attention", kernel, q_TNH.device, shape)


def _constants(q_TNH: Tensor, k_SGH: Tensor, causal: bool, window: int | None) -> dict[str, Any]:
    size = q_TNH.shape[2]
    return {"SHARE": q_TNH.shape[1] // k_SGH.shape[1], "SIZE": size, "WIDTH": max(16, triton.next_power_of_2(size)), "CAUSAL": causal,
            "WINDOW": window or 0}


def _query_tiles(rows: int, starts_U: Tensor, tiles: dict[str, Any]) -> int:
    """As many as any documents may need."""
    return rows // tiles["BLOCK_M"] + len(starts_U)


def _parts(share: int, programs: int, wanted: int) -> int:
    """Among how many programs the heads that share keys are divided, so that there are enough of them."""
    parts = 1
    while parts * programs < wanted and share % (2 * parts) == 0:
        parts *= 2
    return parts


@forward_op.register_fake
def _(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, bias_NTR: Tensor | None, starts_U: Tensor, ends_U: Tensor, key_starts_U: Tensor,
      key_ends_U: Tensor, causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    return q_TNH.new_empty(q_TNH.shape), q_TNH.new_empty((q_TNH.shape[1], q_TNH.shape[0]), dtype=torch.float32)


@backward_op.register_fake
def _(dout_TNH: Tensor, dlse_NT: Tensor | None, q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, bias_NTR: Tensor | None, starts_U: Tensor,
      ends_U: Tensor, key_starts_U: Tensor, key_ends_U: Tensor, out_TNH: Tensor, lse_NT: Tensor, causal: bool, scale: float,
      window: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dbias_NTR = q_TNH.new_empty(0) if bias_NTR is None else torch.empty_like(bias_NTR)
    return q_TNH.new_empty(q_TNH.shape), k_SGH.new_empty(k_SGH.shape), v_SGH.new_empty(v_SGH.shape), dbias_NTR


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.options = inputs[8:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout_TNH: Tensor | None, dlse_NT: Tensor | None) -> tuple[Tensor | None, ...]:
    q_TNH, k_SGH, v_SGH, bias_NTR, *others = ctx.saved_tensors  # once: activation checkpointing has them no second time
    dout_TNH = torch.zeros_like(q_TNH) if dout_TNH is None else dout_TNH
    dq_TNH, dk_SGH, dv_SGH, dbias_NTR = backward_op(dout_TNH, dlse_NT, q_TNH, k_SGH, v_SGH, bias_NTR, *others, *ctx.options)
    return dq_TNH, dk_SGH, dv_SGH, None if bias_NTR is None else dbias_NTR, *[None] * 7


forward_op.register_autograd(_backward, setup_context=_save)
