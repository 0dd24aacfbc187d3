"""What the compiler makes of the pointwise work that has no kernel of ours: norms, rotary embedding, the Conformer's depthwise convolution.

Each takes turns with a copy that moves as many bytes as a forward and a backward have to, which read what goes in and write what comes out
once. A kernel of our own could gain no more than what is above 1.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.conv1d import centred_conv1d
from model.norm import gated_rms_norm, rms_norm
from model.rope import rotate
from perf import report
from perf.timing import alternate
from training.step import DTYPES

TOKENS, FRAMES = 8192, 8192  # a row of nemotron_ep8, and of its audio
WIDTH, INNER, GROUPS = 2688, 4096, 8  # Nemotron-3-Nano: model, Mamba, its groups
HEADS, HEAD_DIM = 32, 128  # Qwen3-30B-A3B's queries
CHANNELS, TAPS = 1024, 9  # FastConformer of 32 layers
EPS = 1e-5


@dataclass
class Work:
    """`function(*moved, *small)`, of which gradients are wanted of all; `moved` are as large as the result, `small` are not counted."""

    function: Callable[..., Tensor]
    moved: list[Tensor]
    small: list[Tensor]
    linear: bool = False  # backward needs nothing of the inputs

    @property
    def bytes(self) -> int:
        """Forward reads `moved` and writes a result; backward reads them again and a gradient, and writes one for each of them."""
        inputs = len(self.moved)
        return (inputs + 1 + (0 if self.linear else inputs) + 1 + inputs) * self.moved[0].nbytes


def run(dtype: str, rounds: int) -> tuple[dict[str, Any], bool]:
    """Time of each over that of its copy."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, result = [], {}
    for name, work in works(DTYPES[dtype], device).items():
        source = torch.empty(work.bytes // 2, dtype=torch.uint8, device=device).fill_(1)
        target = torch.empty_like(source)
        calls = {"ours": _pass(work), "copy": _synchronised(device, functools.partial(target.copy_, source))}
        times = alternate(calls, rounds, 3)
        result[name] = round(times["ours"] / times["copy"], 2)
        rows.append({"what": name, "MB": work.bytes / 1e6, "ms": 1e3 * times["ours"], "copy ms": 1e3 * times["copy"],
                     "copies": result[name]})
    report.show(f"Forward and backward by the compiler, over a copy of the same bytes, {dtype}, {device.type}", rows)
    return {**result, "dtype": dtype, "device": device.type, "threads": torch.get_num_threads()}, True


def works(dtype: torch.dtype, device: torch.device) -> dict[str, Work]:
    """At the sizes of published models."""
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device).requires_grad_()

    positions = torch.arange(TOKENS, device=device) % 700
    segments = (torch.arange(FRAMES, device=device) // 300).int()
    return {
        "rms_norm": Work(lambda x, w: rms_norm(x, w, EPS), [normal(TOKENS, WIDTH)], [normal(WIDTH)]),
        "gated_rms_norm": Work(lambda x, gate, w: gated_rms_norm(x, gate, w, EPS, GROUPS), [normal(TOKENS, INNER), normal(TOKENS, INNER)],
                               [normal(INNER)]),
        "rope": Work(lambda x: rotate(x, positions, 1e6), [normal(TOKENS, HEADS, HEAD_DIM)], [], linear=True),
        "depthwise_conv": Work(lambda x, w, b: centred_conv1d(x, w, b, segments), [normal(FRAMES, CHANNELS)],
                               [normal(CHANNELS, TAPS), normal(CHANNELS)]),
    }


def _pass(work: Work) -> Callable[[], Any]:
    inputs = [*work.moved, *work.small]
    compiled = torch.compile(work.function, fullgraph=True, dynamic=False)
    upstream = torch.randn_like(work.moved[0])
    return _synchronised(upstream.device, lambda: torch.autograd.grad(compiled(*inputs), inputs, upstream))


def _synchronised(device: torch.device, call: Callable[[], Any]) -> Callable[[], Any]:
    def done() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return done
