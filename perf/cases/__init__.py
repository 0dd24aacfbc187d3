"""What each operation is measured on. perf/cases/<operation>.py holds `OPERATION`, an Operation with its list of cases.

A case is one call of the public function. Its use says who runs it:
- "accuracy": so small that Triton's interpreter runs it in a second, forward and backward, with awkward sizes;
- "compile": the widths, options and alignments of a real model with few tokens, so that its kernels are the real ones;
- "model": the shapes of a real model, for a GPU.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

Use = Literal["accuracy", "compile", "model"]


@dataclass
class Draw:
    """Random inputs on one device, in one dtype, the same at every call."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    @classmethod
    def seeded(cls, device: torch.device, dtype: torch.dtype, seed: int = 0) -> "Draw":
        return cls(device, dtype, torch.Generator(device).manual_seed(seed))

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        """Numbers that the dtype holds exactly."""
        return torch.randn(shape, device=self.device, dtype=torch.float32, generator=self.generator).mul_(std).to(self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device).uniform_(low, high, generator=self.generator).to(self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """int64 in [0, high)."""
        return torch.randint(high, shape, device=self.device, generator=self.generator)

    def ends(self, lengths: Sequence[int]) -> Tensor:
        """cu_seqlens of documents of these lengths, int32."""
        return torch.tensor([0, *lengths]).cumsum(0).int().to(self.device)


@dataclass(frozen=True)
class Work:
    """What has to be done at least: floating-point operations of products, and bytes read and written once each."""

    flops: float
    bytes: float

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The roofline's floor."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


@dataclass(frozen=True)
class Case:
    """One call: keyword arguments of the public function (without `implementation`), and what it costs.

    :param inputs: draws the arguments; floating-point tensors among them may be of any dtype
    :param gradients: arguments that get gradients
    :param forward: for "model" cases; backward is the backward alone
    """

    name: str
    use: Use
    inputs: Callable[[Draw], dict[str, Any]]
    gradients: tuple[str, ...]
    forward: Work | None = None
    backward: Work | None = None


@dataclass(frozen=True)
class Operation:
    """One public function with its implementations and cases.

    :param function: called with a case's arguments and implementation=
    :param implementations: the operation's IMPLEMENTATIONS; "reference" among them is taken for the truth, in fp64
    :param candidates: by kernel of its tuned.json, the tiles that `perf compile` compiles and `perf tune` tries besides the chosen ones
    :param products: kernels made of matrix products, which must use the tensor cores' own instructions
    :param devices: where an implementation runs, if not on both a CPU and a GPU
    """

    name: str
    function: Callable[..., Any]
    implementations: Mapping[str, Callable[..., Any]]
    cases: Sequence[Case]
    candidates: Mapping[str, Sequence[Mapping[str, int]]] = field(default_factory=dict)
    products: frozenset[str] = frozenset()
    devices: Mapping[str, str] = field(default_factory=dict)

    def having(self, use: Use) -> list[Case]:
        return [case for case in self.cases if case.use == use]


class UnknownOperation(ValueError):
    """A name that no file of this folder has; the message lists those that exist."""


def operations(only: Sequence[str] = ()) -> list[Operation]:
    """Of every file of this folder, by name; those with the names `only`, if there are any. Raises UnknownOperation for other names."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")
    found = [importlib.import_module(f"perf.cases.{name}").OPERATION for name in names]
    unknown = [name for name in only if name not in {operation.name for operation in found}]
    if unknown:
        raise UnknownOperation(f"--only names {unknown[0]}, which is no operation; choose among {', '.join(o.name for o in found)}")
    return [operation for operation in found if not only or operation.name in only]


def speech_lengths(tokens: int, shortest: int = 30, longest: int = 600) -> list[int]:
    """Lengths of utterances, log-normal as in speech corpora, that fill `tokens` exactly (the last one may be shorter)."""
    drawn = torch.empty(tokens // shortest + 1).log_normal_(5.05, 0.7, generator=torch.Generator().manual_seed(0))
    lengths, left = [], tokens
    for n in drawn.clamp(shortest, longest).int().tolist():
        lengths.append(min(n, left))
        left -= lengths[-1]
        if not left:
            return lengths
    raise ValueError(f"{tokens} tokens are more than {len(drawn)} utterances hold")
