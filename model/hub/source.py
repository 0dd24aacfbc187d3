"""What tensors on disk look like to whoever reads them."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """Tensors by name."""

    def shapes(self) -> dict[str, list[int]]:
        """Shape of every tensor by name."""

    def dtypes(self) -> dict[str, torch.dtype]:
        """Data type of every tensor by name."""

    def read(self, name: str, where: Sequence[slice]) -> Tensor:
        """A box of a tensor; only its bytes are touched."""
