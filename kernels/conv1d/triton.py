"""The convolution on GPUs, bound by memory: one pass forward, two backward (dz with the weights' gradients, then dx).

Rows at a distance belong to the same document if all neighbours in between do, so numbers of documents may come back.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import launch


@triton.jit
def _reach(segments_ptr, row, tokens, near, joined, there):
    """Segments of rows one further away, and whether they are still of the same document."""
    exists = joined & (there >= 0) & (there < tokens)
    segment = tl.load(segments_ptr + there, mask=exists, other=0)
    return segment, exists & (segment == near)


@triton.jit
def _tap(x_ptr, there, joined, channel, channels, stride):
    """Rows of x, zero where they are of another document."""
    offsets = there.to(tl.int64)[:, None] * stride + channel[None, :]
    return tl.load(x_ptr + offsets, mask=joined[:, None] & (channel < channels)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _sum_taps(x_ptr, weight_ptr, segments_ptr, z, row, tokens, channel, channels, x_stride, weight_stride, tap_stride, WIDTH: tl.constexpr,
              AHEAD: tl.constexpr):
    """z + sum over taps w of weight[:, w] x[row + w - (WIDTH - 1) + AHEAD], from the row itself outwards."""
    inside = row < tokens
    weights = weight_ptr + channel.to(tl.int64) * weight_stride
    here = tl.load(segments_ptr + row, mask=inside, other=0)
    near, joined = here, inside
    for k in tl.static_range(0, WIDTH - AHEAD):
        near, joined = _reach(segments_ptr, row, tokens, near, joined, row - k)
        weight = tl.load(weights + (WIDTH - 1 - AHEAD - k) * tap_stride, mask=channel < channels, other=0.0).to(tl.float32)
        z += _tap(x_ptr, row - k, joined, channel, channels, x_stride) * weight[None, :]
    near, joined = here, inside
    for k in tl.static_range(1, AHEAD + 1):
        near, joined = _reach(segments_ptr, row, tokens, near, joined, row + k)
        weight = tl.load(weights + (WIDTH - 1 - AHEAD + k) * tap_stride, mask=channel < channels, other=0.0).to(tl.float32)
        z += _tap(x_ptr, row + k, joined, channel, channels, x_stride) * weight[None, :]
    return z


@triton.jit
def _convolve(x_ptr, weight_ptr, bias_ptr, segments_ptr, y_ptr, tokens, channels, x_stride, weight_stride, tap_stride,
              WIDTH: tl.constexpr, AHEAD: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, BLOCK_T: tl.constexpr,
              BLOCK_C: tl.constexpr):
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    z = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    if BIAS:
        z += tl.load(bias_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    z = _sum_taps(x_ptr, weight_ptr, segments_ptr, z, row, tokens, channel, channels, x_stride, weight_stride, tap_stride, WIDTH, AHEAD)
    if SILU:
        z = z / (1 + tl.exp(-z))
    offsets = row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(y_ptr + offsets, z.to(y_ptr.dtype.element_ty), mask=(row < tokens)[:, None] & (channel < channels)[None, :])


@triton.jit
def _gradients(x_ptr, weight_ptr, bias_ptr, segments_ptr, dy_ptr, dz_ptr, dweight_ptr, dbias_ptr, tokens, channels, span, x_stride,
               weight_stride, tap_stride, dy_stride, WIDTH: tl.constexpr, AHEAD: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
               TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """Gradient of what goes into the activation (without one it is dy), and what a span of rows adds to those of weight and bias."""
    part = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = channel < channels
    tap = tl.arange(0, TAPS)[:, None]
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if BIAS:
        bias += tl.load(bias_ptr + channel, mask=exists, other=0.0).to(tl.float32)
    dweight, dbias = tl.zeros((TAPS, BLOCK_C), tl.float32), tl.zeros((BLOCK_C,), tl.float32)
    for start in range(part * span, tl.minimum(part * span + span, tokens), BLOCK_T):
        row = start + tl.arange(0, BLOCK_T)
        inside = row < tokens
        dz = _tap(dy_ptr, row, inside, channel, channels, dy_stride)
        if SILU:
            z = tl.zeros((BLOCK_T, BLOCK_C), tl.float32) + bias[None, :]
            z = _sum_taps(x_ptr, weight_ptr, segments_ptr, z, row, tokens, channel, channels, x_stride, weight_stride, tap_stride, WIDTH,
                          AHEAD)
            sigmoid = 1 / (1 + tl.exp(-z))
            dz = dz * sigmoid * (1 + z * (1 - sigmoid))
            offsets = row.to(tl.int64)[:, None] * channels + channel[None, :]
            tl.store(dz_ptr + offsets, dz.to(dz_ptr.dtype.element_ty), mask=inside[:, None] & exists[None, :])
        dbias += tl.sum(dz, 0)
        here = tl.load(segments_ptr + row, mask=inside, other=0)
        near, joined = here, inside
        for k in tl.static_range(0, WIDTH - AHEAD):
            near, joined = _reach(segments_ptr, row, tokens, near, joined, row - k)
            total = tl.sum(dz * _tap(x_ptr, row - k, joined, channel, channels, x_stride), 0)
            dweight += tl.where(tap == WIDTH - 1 - AHEAD - k, total[None, :], 0.0)
        near, joined = here, inside
        for k in tl.static_range(1, AHEAD + 1):
            near, joined = _reach(segments_ptr, row, tokens, near, joined, row + k)
            total = tl.sum(dz * _tap(x_ptr, row + k, joined, channel, channels, x_stride), 0)
            dweight += tl.where(tap == WIDTH - 1 - AHEAD + k, total[None, :], 0.0)
    base = part.to(tl.int64) * channels
    tl.store(dbias_ptr + base + channel, dbias, mask=exists)
    tl.store(dweight_ptr + (base + channel[None, :]) * WIDTH + tap, dweight, mask=exists[None, :] & (tap < WIDTH))


def conv1d_triton(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, activation: str | None,
                  ahead: int) -> Tensor:
    return _forward(x_TC, weight_CW, bias_C, segments_T, activation == "silu", ahead)


@torch.library.custom_op("reedling::conv1d_triton", mutates_args=())
def _forward(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, silu: bool, ahead: int) -> Tensor:
    return _launch(x_TC, weight_CW, bias_C, segments_T, silu, ahead)


@torch.library.custom_op("reedling::conv1d_triton_backward", mutates_args=())
def _backward(dy_TC: Tensor, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, silu: bool,
              ahead: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    dy_TC, x_TC, segments_T = launch.whole_rows(dy_TC), launch.whole_rows(x_TC), segments_T.contiguous()
    (tokens, channels), width = x_TC.shape, weight_CW.shape[1]
    dz_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device) if silu else dy_TC
    options = launch.tiles("conv1d", "_gradients", x_TC.device)
    span = options.pop("TILES") * options["BLOCK_T"]
    parts = triton.cdiv(tokens, span)
    dweight_PCW = torch.empty(parts, channels, width, dtype=torch.float32, device=x_TC.device)
    dbias_PC = torch.empty(parts, channels, dtype=torch.float32, device=x_TC.device)
    _gradients[triton.cdiv(channels, options["BLOCK_C"]), parts](
        x_TC, weight_CW, dbias_PC if bias_C is None else bias_C.contiguous(), segments_T, dy_TC, dz_TC, dweight_PCW, dbias_PC, tokens,
        channels, span, x_TC.stride(0), *weight_CW.stride(), dy_TC.stride(0), WIDTH=width, AHEAD=ahead, SILU=silu, BIAS=bias_C is not None,
        TAPS=triton.next_power_of_2(width), **options)
    dx_TC = _launch(dz_TC, weight_CW.flip(1), None, segments_T, False, width - 1 - ahead)
    return dx_TC, dweight_PCW.sum(0).to(weight_CW.dtype), dbias_PC.sum(0).to(weight_CW.dtype if bias_C is None else bias_C.dtype)


def _launch(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, silu: bool, ahead: int) -> Tensor:
    x_TC, segments_T = launch.whole_rows(x_TC), segments_T.contiguous()
    (tokens, channels), width = x_TC.shape, weight_CW.shape[1]
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    options = launch.tiles("conv1d", "_convolve", x_TC.device)
    _convolve[triton.cdiv(channels, options["BLOCK_C"]), triton.cdiv(tokens, options["BLOCK_T"])](
        x_TC, weight_CW, weight_CW if bias_C is None else bias_C.contiguous(), segments_T, y_TC, tokens, channels, x_TC.stride(0),
        *weight_CW.stride(), WIDTH=width, AHEAD=ahead, SILU=silu, BIAS=bias_C is not None, **options)
    return y_TC


@_forward.register_fake
def _(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, silu: bool, ahead: int) -> Tensor:
    return x_TC.new_empty(x_TC.shape)


@_backward.register_fake
def _(dy_TC: Tensor, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, silu: bool,
      ahead: int) -> tuple[Tensor, Tensor, Tensor]:
    dbias_C = weight_CW.new_empty(len(weight_CW)) if bias_C is None else bias_C.new_empty(bias_C.shape)
    return x_TC.new_empty(x_TC.shape), weight_CW.new_empty(weight_CW.shape), dbias_C


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu, ctx.ahead = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:
    x_TC, weight_CW, bias_C, segments_T = ctx.saved_tensors  # once: activation checkpointing has them no second time
    dx_TC, dweight_CW, dbias_C = _backward(dy_TC, x_TC, weight_CW, bias_C, segments_T, ctx.silu, ctx.ahead)
    return dx_TC, dweight_CW, None if bias_C is None else dbias_C, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
