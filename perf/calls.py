"""Runs one case of an operation in any of its implementations: results, gradients and how far they are from others."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perf.cases import Case, Draw, Operation


@dataclass
class Call:
    """A case with its inputs drawn; the same call in fp64 sees the same numbers."""

    operation: Operation
    case: Case
    inputs: dict[str, Any]
    dtype: torch.dtype
    upstream: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def drawn(cls, operation: Operation, case: Case, device: torch.device, dtype: torch.dtype) -> "Call":
        inputs = case.inputs(Draw.seeded(device, dtype))
        return cls(operation, case, {name: _leaf(value, name in case.gradients) for name, value in inputs.items()}, dtype)

    def widened(self) -> "Call":
        """The same in fp64."""
        inputs = {name: _leaf(value.double() if _is_float(value) else value, name in self.case.gradients)
                  for name, value in self.inputs.items()}
        return Call(self.operation, self.case, inputs, self.dtype, self.upstream)

    def forward(self, implementation: str) -> tuple[Tensor, ...]:
        """All results."""
        result = self.operation.function(**self.inputs, implementation=implementation)
        return result if isinstance(result, tuple) else (result,)

    def backward(self, results: Sequence[Tensor], through: Sequence[int] | None = None) -> tuple[Tensor, ...]:
        """Gradients of the case's inputs for fixed gradients of results number `through`, or of all that have any."""
        chosen = [i for i, result in enumerate(results) if result.requires_grad] if through is None else through
        leaves = [self.inputs[name] for name in self.case.gradients]
        return torch.autograd.grad([results[i] for i in chosen], leaves, [self._upstream(i, results[i]) for i in chosen], allow_unused=True)

    def _upstream(self, i: int, result: Tensor) -> Tensor:
        """Numbers that every dtype of this call holds exactly."""
        if i not in self.upstream:
            self.upstream[i] = Draw.seeded(result.device, self.dtype, seed=1 + i).normal(*result.shape)
        return self.upstream[i].to(result.dtype)

    def results(self, implementation: str, through: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Results by number and gradients by name."""
        results = self.forward(implementation)
        named = {str(i): result.detach() for i, result in enumerate(results)}
        if self.case.gradients:
            grads = self.backward(results, through)
            named |= {f"d{name}": torch.zeros_like(self.inputs[name]) if grad is None else grad
                      for name, grad in zip(self.case.gradients, grads, strict=True)}
        return named


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _leaf(value: Any, gradient: bool) -> Any:
    return value.detach().requires_grad_(gradient) if _is_float(value) else value


def differentiable(call: Call, implementation: str) -> list[int]:
    """Numbers of the results that have gradients."""
    return [i for i, result in enumerate(call.forward(implementation)) if result.requires_grad]


def error(got: Tensor, exact: Tensor) -> float:
    """norm(got - exact) / norm(exact); infinite where one is finite and the other is not, or not the same infinity."""
    got, exact = got.double(), exact.double()
    finite = exact.isfinite()
    if got.shape != exact.shape or not torch.equal(got.isfinite(), finite) or not torch.equal(got[~finite], exact[~finite]):
        return math.inf
    size, difference = float(exact[finite].norm()), float((got[finite] - exact[finite]).norm())
    return difference / size if size else difference


def unavailable(operation: Operation, implementation: str, device: torch.device) -> str:
    """Why an implementation does not run here; empty if it does."""
    wanted = operation.devices.get(implementation, "cuda" if implementation == "triton" else device.type)
    return "" if wanted == device.type else f"runs on {wanted}"


def attempted(operation: Operation, implementation: str, run: Callable[[], Any]) -> tuple[Any, str]:
    """The result, or None and why there is none: a package or an option that is missing, a shape that another library refuses."""
    try:
        return run(), ""
    except (ImportError, NotImplementedError) as reason:
        return None, f"{type(reason).__name__}: {reason}"
    except RuntimeError as reason:
        if not _is_library(operation, implementation) or isinstance(reason, torch.OutOfMemoryError):
            raise
        return None, str(reason)


def withheld(operation: Operation, implementation: str, name: str, value: Tensor) -> bool:
    """Whether another library keeps this result to itself: any but the first may then be NaN, wherever it is not filled."""
    optional = _is_library(operation, implementation) and name.isdigit() and name != "0"
    return optional and bool(value.isnan().any()) and not value.isfinite().any()


def _is_library(operation: Operation, implementation: str) -> bool:
    return operation.implementations[implementation].__module__.endswith(".adapters")
