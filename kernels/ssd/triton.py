"""The scan on GPUs, in spans of several chunks: states stay in registers within a span and reach memory only between spans.

Forward: every span's own addition to the state (_walk), the states between spans (_pass), outputs (_scan). Backward: the states before and
their gradients after each chunk, again by _walk and _pass, then all else, a chunk and a group of heads at a time, so that the heads of a
group add up in registers (_readers, _writers). Nothing is added atomically: repeated runs agree bit for bit.

Letters: L chunks, P spans; `run` numbers the documents of a chunk, 0 for the one that the chunk before it ended with.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import launch

SMALLEST = 16  # rows or columns of a product
LARGEST = 64  # tokens of a chunk in tuned.json
SPAN = 8  # chunks
WIDEST = (64, 128)  # head dim and states of a call of the kernels, whose tiles hold both whole


@triton.jit
def _decays(dt_ptr, segments_ptr, a, start, tokens, dt_stride, CHUNK: tl.constexpr):
    """Of one chunk and head: dt, 0 beyond the row; log decays since the document or the chunk began; run; who sees whom [to, from]."""
    place = tl.arange(0, CHUNK)
    row = start + place
    inside = row < tokens
    dt = tl.load(dt_ptr + row.to(tl.int64) * dt_stride, mask=inside, other=0.0)
    segment = tl.load(segments_ptr + row, mask=inside, other=0)
    before = tl.load(segments_ptr + row - 1, mask=inside & (row > 0), other=0)
    run = tl.cumsum((inside & (row > 0) & (segment != before)).to(tl.int32), 0)
    sees = (run[:, None] == run[None, :]) & (place[:, None] >= place[None, :])
    log = dt * a
    return dt, tl.sum(tl.where(sees, log[None, :], 0.0), 1), run, sees


@triton.jit
def _tile(start, tokens, stride, columns, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Offsets of a tile of rows and which of its elements exist; 64 bits wide from the first row, 32 bits, and fewer registers, within."""
    place = tl.arange(0, CHUNK)
    mask = (start + place < tokens)[:, None] & (columns < WIDTH)[None, :]
    return start.to(tl.int64) * stride, place[:, None] * stride + columns[None, :], mask


@triton.jit
def _load(ptr, start, tokens, stride, columns, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    first, offsets, mask = _tile(start, tokens, stride, columns, WIDTH, CHUNK)
    return tl.load(ptr + first + offsets, mask=mask, other=0.0)


@triton.jit
def _store(ptr, value, start, tokens, stride, columns, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    first, offsets, mask = _tile(start, tokens, stride, columns, WIDTH, CHUNK)
    tl.store(ptr + first + offsets, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _walk(x_ptr, b_ptr, dt_ptr, a_ptr, segments_ptr, first_ptr, chunks_ptr, added_ptr, kept_ptr, before_ptr, passing_ptr, tokens, span,
          heads, x_stride, x_head, b_stride, b_group, dt_stride, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
          REVERSE: tl.constexpr, EMIT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr):
    """Carries a state along a span. EMIT: from first, storing what each chunk meets; else from zero, storing what the span adds and keeps.

    REVERSE carries the gradient of the state backwards: x is then the gradient of y, b is C, and there is no dt. With EMIT its product with
    the state before the chunk, as far as the chunk keeps that, goes to passing: what log decays get from what passes over the chunk.
    """
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    s = tl.arange(0, BLOCK_S)
    tile = h[:, None] * STATE + s[None, :]
    exists = (h < HEAD_DIM)[:, None] & (s < STATE)[None, :]
    place = (part * heads + head) * (HEAD_DIM * STATE)
    a = tl.load(a_ptr + head)
    state = tl.zeros((BLOCK_H, BLOCK_S), tl.float32)
    if EMIT:
        state += tl.load(first_ptr + place + tile, mask=exists, other=0.0).to(tl.float32)
    kept = 1.0
    begin = part * span
    count = tl.cdiv(tl.minimum(span, tokens - begin), CHUNK)
    for step in range(0, count):
        chunk = begin // CHUNK + (count - 1 - step if REVERSE else step)
        if EMIT:
            target = chunks_ptr + (chunk * heads + head) * (HEAD_DIM * STATE)
            tl.store(target + tile, state.to(chunks_ptr.dtype.element_ty), mask=exists)
        dt, cum, run, _ = _decays(dt_ptr + head, segments_ptr, a, chunk * CHUNK, tokens, dt_stride, CHUNK)
        last = tl.max(run, 0)
        total = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, cum, 0.0), 0)
        if REVERSE:
            weight = tl.exp(tl.where(run == 0, cum, float("-inf")))
        else:
            weight = dt * tl.exp(tl.where(run == last, total - cum, float("-inf")))
        stays = tl.where(last == 0, tl.exp(total), 0.0)
        if EMIT and REVERSE:
            before = tl.load(before_ptr + (chunk * heads + head) * (HEAD_DIM * STATE) + tile, mask=exists, other=0.0).to(tl.float32)
            passing = tl.sum(tl.sum(before * state, 1), 0) * stays
            tl.store(passing_ptr + (chunk * heads + head) * tl.num_programs(2) + tl.program_id(2), passing)
        x = _load(x_ptr + head * x_head, chunk * CHUNK, tokens, x_stride, h, HEAD_DIM, CHUNK)
        b = _load(b_ptr + head // HEADS * b_group, chunk * CHUNK, tokens, b_stride, s, STATE, CHUNK)
        weighted = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
        state = tl.dot(tl.trans(weighted), b, acc=state * stays, input_precision="ieee")
        kept *= stays
    if not EMIT:
        tl.store(added_ptr + place + tile, state.to(added_ptr.dtype.element_ty), mask=exists)
        tl.store(kept_ptr + part * heads + head, kept)


@triton.jit
def _pass(states_ptr, kept_ptr, first_ptr, last_ptr, parts, heads, SIZE: tl.constexpr, REVERSE: tl.constexpr, FIRST: tl.constexpr,
          BLOCK: tl.constexpr):
    """Replaces what each span adds by the state that it meets; the state after all of them goes to last."""
    head = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = i < SIZE
    state = tl.zeros((BLOCK,), tl.float32)
    if FIRST:
        state += tl.load(first_ptr + head * SIZE + i, mask=exists, other=0.0)
    for step in range(0, parts):
        part = parts - 1 - step if REVERSE else step
        pointers = states_ptr + (part * heads + head) * SIZE + i
        added = tl.load(pointers, mask=exists, other=0.0).to(tl.float32)
        tl.store(pointers, state.to(states_ptr.dtype.element_ty), mask=exists)
        state = state * tl.load(kept_ptr + part * heads + head) + added
    tl.store(last_ptr + head * SIZE + i, state, mask=exists)


@triton.jit
def _scan(x_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, d_ptr, segments_ptr, first_ptr, y_ptr, tokens, span, heads,
          x_stride, x_head, b_stride, b_group, c_stride, c_group, dt_stride, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
          STATE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr):
    """Outputs of a span, chunk after chunk."""
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    s = tl.arange(0, BLOCK_S)
    a, d = tl.load(a_ptr + head), tl.load(d_ptr + head)
    place = (part * heads + head) * (HEAD_DIM * STATE)
    exists = (h < HEAD_DIM)[:, None] & (s < STATE)[None, :]
    state = tl.load(first_ptr + place + h[:, None] * STATE + s[None, :], mask=exists, other=0.0).to(tl.float32)
    begin = part * span
    for step in range(0, tl.cdiv(tl.minimum(span, tokens - begin), CHUNK)):
        start = begin + step * CHUNK
        dt, cum, run, sees = _decays(dt_ptr + head, segments_ptr, a, start, tokens, dt_stride, CHUNK)
        c = _load(c_ptr + head // HEADS * c_group, start, tokens, c_stride, s, STATE, CHUNK)
        b = _load(b_ptr + head // HEADS * b_group, start, tokens, b_stride, s, STATE, CHUNK)
        x = _load(x_ptr + head * x_head, start, tokens, x_stride, h, HEAD_DIM, CHUNK)

        y = tl.dot(c, tl.trans(state.to(c.dtype)), input_precision="ieee") * tl.exp(tl.where(run == 0, cum, float("-inf")))[:, None]
        decay = tl.exp(tl.where(sees, cum[:, None] - cum[None, :], float("-inf")))
        mix = tl.dot(c, tl.trans(b), input_precision="ieee") * decay * dt[None, :]
        y = tl.dot(mix.to(x.dtype), x, acc=y, input_precision="ieee") + d * x.to(tl.float32)
        _store(y_ptr + head * HEAD_DIM, y, start, tokens, heads * HEAD_DIM, h, HEAD_DIM, CHUNK)

        last = tl.max(run, 0)
        total = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, cum, 0.0), 0)
        weight = dt * tl.exp(tl.where(run == last, total - cum, float("-inf")))
        x = _load(x_ptr + head * x_head, start, tokens, x_stride, h, HEAD_DIM, CHUNK)  # again: registers would spill
        weighted = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
        stays = tl.where(last == 0, tl.exp(total), 0.0)
        state = tl.dot(tl.trans(weighted), b, acc=state * stays, input_precision="ieee")


@triton.jit
def _readers(x_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, segments_ptr, dy_ptr, before_ptr, dc_ptr, dscores_ptr, dlog_ptr, tokens, heads,
             x_stride, x_head, b_stride, b_group, c_stride, c_group, dt_stride, dy_stride, dy_head, HEADS: tl.constexpr,
             HEAD_DIM: tl.constexpr, STATE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr):
    """Gradients on the side of the rows that read, of one chunk and group, head after head: of C, of the scores C Bᵀ, and of log decays.

    A log decay at t gets what passes over t. Here that is what rows i >= t read, from rows j < t of the chunk and from the state before it.
    Pairs i = j are left out of both sums, where they would not cancel exactly.
    """
    group, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = chunk * CHUNK
    place, h, s = tl.arange(0, CHUNK), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_S)
    state_tile = h[:, None] * STATE + s[None, :]
    exists = (h < HEAD_DIM)[:, None] & (s < STATE)[None, :]
    c = _load(c_ptr + group * c_group, start, tokens, c_stride, s, STATE, CHUNK)
    b = _load(b_ptr + group * b_group, start, tokens, b_stride, s, STATE, CHUNK)
    scores = tl.dot(c, tl.trans(b), input_precision="ieee")
    dscores = tl.zeros((CHUNK, CHUNK), tl.float32)
    dc = tl.zeros((CHUNK, BLOCK_S), tl.float32)
    for member in range(0, HEADS):
        head = group * HEADS + member
        dt, cum, run, sees = _decays(dt_ptr + head, segments_ptr, tl.load(a_ptr + head), start, tokens, dt_stride, CHUNK)
        from_start = tl.exp(tl.where(run == 0, cum, float("-inf")))
        dy = _load(dy_ptr + head * dy_head, start, tokens, dy_stride, h, HEAD_DIM, CHUNK)
        arriving = tl.zeros((CHUNK,), tl.float32)
        if tl.min(run, 0) == 0:  # else a document begins with the chunk
            before = tl.load(before_ptr + (chunk * heads + head) * (HEAD_DIM * STATE) + state_tile, mask=exists, other=0.0).to(dy.dtype)
            if dy.dtype == tl.float32:
                read = tl.dot(dy * from_start[:, None], before, input_precision="ieee")  # the other way registers would spill
            else:
                read = tl.dot(dy, before) * from_start[:, None]  # the other way would round twice
            dc += read
            c = _load(c_ptr + group * c_group, start, tokens, c_stride, s, STATE, CHUNK)  # again: registers would spill
            arriving = tl.sum(c.to(tl.float32) * read, 1)

        x = _load(x_ptr + head * x_head, start, tokens, x_stride, h, HEAD_DIM, CHUNK)
        decay = tl.exp(tl.where(sees, cum[:, None] - cum[None, :], float("-inf"))) * dt[None, :]
        dmix = tl.dot(dy, tl.trans(x), input_precision="ieee") * decay
        dscores += dmix
        pairs = tl.where(place[:, None] > place[None, :], dmix * scores, 0.0)
        arriving += tl.sum(pairs, 1) - tl.sum(pairs, 0)
        dlog = tl.sum(tl.where(sees, arriving[:, None], 0.0), 0)
        row = start + place
        tl.store(dlog_ptr + row.to(tl.int64) * heads + head, dlog, mask=row < tokens)
    b = _load(b_ptr + group * b_group, start, tokens, b_stride, s, STATE, CHUNK)
    narrow = dscores.to(b.dtype)
    tile = (chunk * (heads // HEADS) + group) * (CHUNK * CHUNK) + place[:, None] * CHUNK + place[None, :]
    tl.store(dscores_ptr + tile, narrow)
    dc += tl.dot(narrow, b, input_precision="ieee")
    _store(dc_ptr + group * STATE, dc, start, tokens, heads // HEADS * STATE, s, STATE, CHUNK)


@triton.jit
def _writers(x_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, d_ptr, segments_ptr, dy_ptr, after_ptr, passing_ptr, dscores_ptr, dlog_ptr, dx_ptr, db_ptr,
             ddt_ptr, dd_ptr, tokens, heads, x_stride, x_head, b_stride, b_group, c_stride, c_group, dt_stride, dy_stride, dy_head,
             HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr,
             BLOCK_S: tl.constexpr):
    """Gradients on the side of the rows that write: of x, B, dt and log decays, and a chunk's part of that of d.

    A log decay at t gets, besides what _readers found, what goes to the state after the chunk: from rows j < t, and what is passing.
    """
    group, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = chunk * CHUNK
    place, h, s = tl.arange(0, CHUNK), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_S)
    row = start + place
    state_tile = h[:, None] * STATE + s[None, :]
    exists = (h < HEAD_DIM)[:, None] & (s < STATE)[None, :]
    c = _load(c_ptr + group * c_group, start, tokens, c_stride, s, STATE, CHUNK)
    b = _load(b_ptr + group * b_group, start, tokens, b_stride, s, STATE, CHUNK)
    db = tl.zeros((CHUNK, BLOCK_S), tl.float32)
    for member in range(0, HEADS):
        head = group * HEADS + member
        a, d = tl.load(a_ptr + head), tl.load(d_ptr + head)
        dt, cum, run, _ = _decays(dt_ptr + head, segments_ptr, a, start, tokens, dt_stride, CHUNK)
        last = tl.max(run, 0)
        total = tl.sum(tl.where(place == CHUNK - 1, cum, 0.0), 0)
        to_end = tl.exp(tl.where(run == last, total - cum, float("-inf")))
        after = tl.load(after_ptr + (chunk * heads + head) * (HEAD_DIM * STATE) + state_tile, mask=exists, other=0.0).to(b.dtype)
        x = _load(x_ptr + head * x_head, start, tokens, x_stride, h, HEAD_DIM, CHUNK)
        db = tl.dot((x.to(tl.float32) * (dt * to_end)[:, None]).to(x.dtype), after, acc=db, input_precision="ieee")
        du = tl.dot(b, tl.trans(after), input_precision="ieee") * to_end[:, None]
        leaving = tl.sum(x.to(tl.float32) * du, 1) * dt
        seen = (run[:, None] == run[None, :]) & (place[:, None] <= place[None, :])
        mix = tl.dot(b, tl.trans(c), input_precision="ieee") * tl.exp(tl.where(seen, cum[None, :] - cum[:, None], float("-inf")))
        dy = _load(dy_ptr + head * dy_head, start, tokens, dy_stride, h, HEAD_DIM, CHUNK)
        du = tl.dot(mix.to(dy.dtype), dy, acc=du, input_precision="ieee")
        dx = du * dt[:, None] + d * dy.to(tl.float32)
        _store(dx_ptr + head * HEAD_DIM, dx, start, tokens, heads * HEAD_DIM, h, HEAD_DIM, CHUNK)

        dlog = tl.load(dlog_ptr + row.to(tl.int64) * heads + head, mask=row < tokens, other=0.0)
        dlog += tl.where(run == last, tl.cumsum(leaving, 0) - leaving, 0.0)
        dlog += tl.load(passing_ptr + chunk * heads + head)
        x = _load(x_ptr + head * x_head, start, tokens, x_stride, h, HEAD_DIM, CHUNK)  # again: registers would spill
        ddt = tl.sum(x.to(tl.float32) * du, 1) + dlog * a
        tl.store(ddt_ptr + row.to(tl.int64) * heads + head, ddt, mask=row < tokens)
        tl.store(dlog_ptr + row.to(tl.int64) * heads + head, dlog, mask=row < tokens)
        tl.store(dd_ptr + chunk * heads + head, tl.sum(tl.sum(x.to(tl.float32) * dy.to(tl.float32), 1), 0))
    tile = (chunk * (heads // HEADS) + group) * (CHUNK * CHUNK) + place[:, None] * CHUNK + place[None, :]
    db += tl.dot(tl.trans(tl.load(dscores_ptr + tile)), c, input_precision="ieee")
    _store(db_ptr + group * STATE, db, start, tokens, heads // HEADS * STATE, s, STATE, CHUNK)


def ssd_triton(x_TNH: Tensor, dt_TN: Tensor, a_N: Tensor, b_TGS: Tensor, c_TGS: Tensor, d_N: Tensor, segments_T: Tensor,
               initial_NHS: Tensor | None, chunk: int, state_dtype: torch.dtype, wants_state: bool) -> tuple[Tensor, Tensor]:
    """y and the state after the last token; `chunk` only bounds the tiles' own size.

    Columns of x do not meet, and y is a sum over states: a wider head is several heads of equal dt, more states are several scans.
    """
    state, cuts = b_TGS.shape[2], _cuts(x_TNH.shape[2])
    x_TNH = x_TNH.unflatten(2, (cuts, -1)).flatten(1, 2)
    dt_TN, a_N, d_N = (t.repeat_interleave(cuts, -1) if cuts > 1 else t for t in (dt_TN, a_N, d_N))
    none_N = torch.zeros_like(d_N)
    if initial_NHS is not None:
        initial_NHS = initial_NHS.unflatten(1, (cuts, -1)).flatten(0, 1)
    scans = []
    for first in range(0, state, WIDEST[1]):
        part = slice(first, first + WIDEST[1])
        scans.append(_forward(x_TNH, dt_TN, a_N, b_TGS[..., part], c_TGS[..., part], none_N if first else d_N, segments_T,
                              None if initial_NHS is None else initial_NHS[..., part], chunk, state_dtype))
    y_TNH = sum((y for y, _, _ in scans[1:]), scans[0][0])
    final_NHS = scans[0][1] if len(scans) == 1 else torch.cat([final for _, final, _ in scans], 2)
    return y_TNH.unflatten(1, (-1, cuts)).flatten(2), final_NHS.unflatten(0, (-1, cuts)).flatten(1, 2)


def _cuts(head_dim: int) -> int:
    """Fewest equal parts of a head that fit the kernels."""
    return next(cuts for cuts in range(triton.cdiv(head_dim, WIDEST[0]), head_dim + 1) if head_dim % cuts == 0)


@torch.library.custom_op("reedling::ssd_triton", mutates_args=())
def _forward(x_TNH: Tensor, dt_TN: Tensor, a_N: Tensor, b_TGS: Tensor, c_TGS: Tensor, d_N: Tensor, segments_T: Tensor,
             initial_NHS: Tensor | None, chunk: int, state_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final state, and the states that the spans meet [P, N, H, S]."""
    x_TNH, b_TGS, c_TGS, dt_TN = (launch.whole_rows(t) for t in (x_TNH, b_TGS, c_TGS, dt_TN))
    a_N, d_N, segments_T = a_N.contiguous(), d_N.contiguous(), segments_T.contiguous()
    tokens, heads, _ = x_TNH.shape
    y_TNH = torch.empty(x_TNH.shape, dtype=x_TNH.dtype, device=x_TNH.device)
    span, parts = _spans(tokens, chunk)
    states_PNHS, final_NHS = _between_spans(x_TNH, b_TGS, dt_TN, a_N, segments_T, initial_NHS, chunk, state_dtype, reverse=False)
    options, head_blocks = _options("_scan", x_TNH, b_TGS, chunk)
    _scan[heads, parts, head_blocks](
        x_TNH, b_TGS, c_TGS, dt_TN, a_N, d_N, segments_T, states_PNHS, y_TNH, tokens, span, heads, *x_TNH.stride()[:2],
        *b_TGS.stride()[:2], *c_TGS.stride()[:2], dt_TN.stride(0), **options)
    return y_TNH, final_NHS, states_PNHS


@torch.library.custom_op("reedling::ssd_triton_backward", mutates_args=())
def _backward(dy_TNH: Tensor, dfinal_NHS: Tensor | None, x_TNH: Tensor, dt_TN: Tensor, a_N: Tensor, b_TGS: Tensor, c_TGS: Tensor,
              d_N: Tensor, segments_T: Tensor, states_PNHS: Tensor,
              chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, a, b, c, d and of the initial state."""
    dy_TNH, x_TNH, b_TGS, c_TGS, dt_TN = (launch.whole_rows(t) for t in (dy_TNH, x_TNH, b_TGS, c_TGS, dt_TN))
    a_N, d_N, segments_T = a_N.contiguous(), d_N.contiguous(), segments_T.contiguous()
    tokens, heads, _ = x_TNH.shape
    options = {kernel: _options(kernel, x_TNH, b_TGS, chunk)[0] for kernel in ("_readers", "_writers")}
    size = options["_readers"]["CHUNK"]
    before_LNHS, _ = _at_chunks(x_TNH, b_TGS, dt_TN, a_N, segments_T, states_PNHS, chunk, size, None)
    dstates_PNHS, dinitial_NHS = _between_spans(dy_TNH, c_TGS, dt_TN, a_N, segments_T, dfinal_NHS, chunk, states_PNHS.dtype, reverse=True)
    after_LNHS, passing_LN = _at_chunks(dy_TNH, c_TGS, dt_TN, a_N, segments_T, dstates_PNHS, chunk, size, before_LNHS)
    dx_TNH, db_TGS, dc_TGS = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x_TNH, b_TGS, c_TGS))
    ddt_TN, dlog_TN = (torch.empty(dt_TN.shape, dtype=dt_TN.dtype, device=dt_TN.device) for _ in range(2))
    chunks, groups = len(before_LNHS), b_TGS.shape[1]
    dscores_LGQQ = x_TNH.new_empty(chunks, groups, size, size)
    dd_LN = a_N.new_empty(chunks, heads)
    numbers = (tokens, heads, *x_TNH.stride()[:2], *b_TGS.stride()[:2], *c_TGS.stride()[:2], dt_TN.stride(0), *dy_TNH.stride()[:2])
    _readers[groups, chunks](
        x_TNH, b_TGS, c_TGS, dt_TN, a_N, segments_T, dy_TNH, before_LNHS, dc_TGS, dscores_LGQQ, dlog_TN, *numbers, **options["_readers"])
    _writers[groups, chunks](
        x_TNH, b_TGS, c_TGS, dt_TN, a_N, d_N, segments_T, dy_TNH, after_LNHS, passing_LN, dscores_LGQQ, dlog_TN, dx_TNH, db_TGS, ddt_TN,
        dd_LN, *numbers, **options["_writers"] | {"CHUNK": size})
    return dx_TNH, ddt_TN, (dlog_TN * dt_TN).sum(0), db_TGS, dc_TGS, dd_LN.sum(0), dinitial_NHS


def _between_spans(x_TNH: Tensor, b_TGS: Tensor, dt_TN: Tensor, a_N: Tensor, segments_T: Tensor, first_NHS: Tensor | None, chunk: int,
                   dtype: torch.dtype, reverse: bool) -> tuple[Tensor, Tensor]:
    """The state that each span meets [P, N, H, S], and the one after the last; backwards for gradients."""
    (tokens, heads, head_dim), state = x_TNH.shape, b_TGS.shape[2]
    span, parts = _spans(tokens, chunk)
    states_PNHS = torch.empty(parts, heads, head_dim, state, dtype=dtype, device=x_TNH.device)
    kept_PN = a_N.new_empty(parts, heads)
    last_NHS = a_N.new_empty(heads, head_dim, state)
    options, head_blocks = _options("_walk", x_TNH, b_TGS, chunk)
    _walk[heads, parts, head_blocks](
        x_TNH, b_TGS, dt_TN, a_N, segments_T, states_PNHS, states_PNHS, states_PNHS, kept_PN, states_PNHS, kept_PN, tokens, span, heads,
        *x_TNH.stride()[:2], *b_TGS.stride()[:2], dt_TN.stride(0), REVERSE=reverse, EMIT=False, **options)
    first_NHS = None if first_NHS is None else first_NHS.contiguous()
    blocks = launch.tiles("ssd", "_pass", x_TNH.device)
    _pass[heads, triton.cdiv(head_dim * state, blocks["BLOCK"])](
        states_PNHS, kept_PN, last_NHS if first_NHS is None else first_NHS, last_NHS, parts, heads, SIZE=head_dim * state, REVERSE=reverse,
        FIRST=first_NHS is not None, **blocks)
    return states_PNHS, last_NHS


def _at_chunks(x_TNH: Tensor, b_TGS: Tensor, dt_TN: Tensor, a_N: Tensor, segments_T: Tensor, states_PNHS: Tensor, chunk: int, size: int,
               before_LNHS: Tensor | None) -> tuple[Tensor, Tensor]:
    """States before the chunks of `size` tokens [L, N, H, S]; given those, gradients of states after them, and what is passing [L, N]."""
    tokens, heads, _ = x_TNH.shape
    span, parts = _spans(tokens, chunk)
    chunks_LNHS = states_PNHS.new_empty(triton.cdiv(tokens, size), *states_PNHS.shape[1:])
    options, head_blocks = _options("_walk", x_TNH, b_TGS, chunk)
    passing_LNJ = a_N.new_empty(len(chunks_LNHS), heads, head_blocks)
    reverse = before_LNHS is not None
    _walk[heads, parts, head_blocks](
        x_TNH, b_TGS, dt_TN, a_N, segments_T, states_PNHS, chunks_LNHS, states_PNHS, a_N, before_LNHS if reverse else chunks_LNHS,
        passing_LNJ, tokens, span, heads, *x_TNH.stride()[:2], *b_TGS.stride()[:2], dt_TN.stride(0), REVERSE=reverse, EMIT=True,
        **options | {"CHUNK": size})
    return chunks_LNHS, passing_LNJ.sum(2)


def _spans(tokens: int, chunk: int) -> tuple[int, int]:
    """Tokens of a span, and the number of spans: the same in every kernel of a call."""
    span = SPAN * _bounded(LARGEST, chunk)
    return span, triton.cdiv(tokens, span)


def _bounded(size: int, chunk: int) -> int:
    return min(size, max(SMALLEST, triton.next_power_of_2(chunk)))


def _options(kernel: str, x_TNH: Tensor, b_TGS: Tensor, chunk: int) -> tuple[dict[str, Any], int]:
    """Constants of a launch, and the number of blocks that cover a head."""
    (_, heads, head_dim), (_, groups, state) = x_TNH.shape, b_TGS.shape
    options = launch.tiles("ssd", kernel, x_TNH.device, "fp32" if x_TNH.element_size() == 4 else "16 bits")
    whole = max(SMALLEST, triton.next_power_of_2(head_dim))
    options["CHUNK"] = _bounded(options["CHUNK"], chunk)
    options["BLOCK_H"] = min(whole, options.get("BLOCK_H", whole))
    options["BLOCK_S"] = max(SMALLEST, triton.next_power_of_2(state))
    return options | {"HEADS": heads // groups, "HEAD_DIM": head_dim, "STATE": state}, triton.cdiv(head_dim, options["BLOCK_H"])


@_forward.register_fake
def _(x_TNH: Tensor, dt_TN: Tensor, a_N: Tensor, b_TGS: Tensor, c_TGS: Tensor, d_N: Tensor, segments_T: Tensor,
      initial_NHS: Tensor | None, chunk: int, state_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    state_shape = (*x_TNH.shape[1:], b_TGS.shape[2])
    return (x_TNH.new_empty(x_TNH.shape), a_N.new_empty(state_shape),
            x_TNH.new_empty(_spans(x_TNH.shape[0], chunk)[1], *state_shape, dtype=state_dtype))


@_backward.register_fake
def _(dy_TNH: Tensor, dfinal_NHS: Tensor | None, x_TNH: Tensor, dt_TN: Tensor, a_N: Tensor, b_TGS: Tensor, c_TGS: Tensor,
      d_N: Tensor, segments_T: Tensor, states_PNHS: Tensor,
      chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, ddt, da, db, dc, dd = (t.new_empty(t.shape) for t in (x_TNH, dt_TN, a_N, b_TGS, c_TGS, d_N))
    return dx, ddt, da, db, dc, dd, a_N.new_empty(states_PNHS.shape[1:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, initial_NHS, ctx.chunk, _ = inputs
    ctx.has_initial = initial_NHS is not None
    ctx.save_for_backward(*tensors, output[2])


def _differentiate(ctx: Any, dy_TNH: Tensor, dfinal_NHS: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    *gradients, dinitial_NHS = _backward(dy_TNH, dfinal_NHS, *ctx.saved_tensors, ctx.chunk)
    return *gradients, None, dinitial_NHS if ctx.has_initial else None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
