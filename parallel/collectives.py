"""All communication by name: traceable collectives along dimension 0, under one name for every supported torch (2.11 calls them *_tensor,
2.13 *_single), then those between steps, over the whole world unless a group is given."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._C._distributed_c10d import _register_work
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group


def _named(name: str, suffix: str = ""):  # type: ignore[no-untyped-def]
    return getattr(funcol, f"{name}_single{suffix}", None) or getattr(funcol, f"{name}_tensor{suffix}")


_all_gather_grad, _reduce_scatter_grad = _named("all_gather", "_autograd"), _named("reduce_scatter", "_autograd")
_begin = torch.ops._c10d_functional  # the functions of funcol wait at once while a graph is made


def all_gather_start(x: Tensor, group: ProcessGroup) -> Tensor:
    """Begin to concatenate the ranks' `x` of equal shape; pass the result to `wait` before use. No gradient."""
    return _begin.all_gather_into_tensor(x, group.size(), group.group_name)


def reduce_scatter_start(x: Tensor, group: ProcessGroup) -> Tensor:
    """Begin to add up over the ranks, of which this rank keeps its equal part; `wait` as above. No gradient."""
    return _begin.reduce_scatter_tensor(x, "sum", group.size(), group.group_name)


def all_reduce_start(x: Tensor, group: ProcessGroup) -> Tensor:
    """Begin to add up over the ranks, in place; `wait` as above. No gradient."""
    return _begin.all_reduce_(x, "sum", group.group_name)


def sum_start(x: Tensor, group: ProcessGroup) -> Tensor:
    """Begin to add up over the ranks; `wait` as above. No gradient."""
    return _begin.all_reduce(x, "sum", group.group_name)


def all_to_all_start(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    """Begin an `all_to_all`; `wait` as above. No gradient."""
    return _begin.all_to_all_single(x, received, sent, group.group_name)


def wait(x: Tensor) -> Tensor:
    """The finished result of a collective that was begun."""
    return funcol.wait_tensor(x)


def exchange_start_grad(x: Tensor, group: ProcessGroup, received: list[int] | None = None,
                        sent: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Begin an all-gather, or with rows for each rank an all-to-all; pass the result and the rest to `exchange_wait_grad` before use.

    What is computed in between runs beside it, and in backward beside the way back: that begins at the place of `exchange_wait_grad` and is
    waited for here.
    """
    return _ExchangeStart.apply(x, group, received, sent)


def exchange_wait_grad(begun: tuple[Tensor, Tensor], group: ProcessGroup, received: list[int] | None = None,
                       sent: list[int] | None = None) -> Tensor:
    """The finished result of `exchange_start_grad`; the gradient goes back by the same way."""
    return _ExchangeWait.apply(*begun, group, received, sent)


class _ExchangeStart(torch.autograd.Function):
    """What is under way, and x itself, whose gradient has the shape of what comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, received: list[int] | None, sent: list[int] | None) -> tuple[Tensor, Tensor]:
        begun = all_gather_start(x, group) if received is None or sent is None else all_to_all_start(x, received, sent, group)
        ctx.mark_non_differentiable(begun)
        ctx.set_materialize_grads(False)
        return begun, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, none: None, begun: Tensor) -> Any:
        return wait(begun), None, None, None


class _ExchangeWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: Tensor, x: Tensor, group: ProcessGroup, received: list[int] | None, sent: list[int] | None) -> Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        return wait(begun)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.contiguous()
        begun = reduce_scatter_start(grad, ctx.group) if ctx.sent is None else all_to_all_start(grad, ctx.sent, ctx.received, ctx.group)
        return None, begun, None, None, None


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks, of which this rank keeps its equal part. No gradient."""
    return wait(reduce_scatter_start(x, group))


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks, on each of them. No gradient."""
    return wait(sum_start(x, group))


def all_gather_grad(x: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenation of the ranks' `x`; the gradient is summed over the ranks and scattered."""
    return funcol.wait_tensor(_all_gather_grad(x, 0, group))


def reduce_scatter_grad(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks, of which this rank keeps its equal part; the gradient is gathered."""
    return funcol.wait_tensor(_reduce_scatter_grad(x, "sum", 0, group))


def all_to_all(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    """The first sent[0] rows of x go to rank 0, the next sent[1] to rank 1, ...; likewise the rows of the result come. No gradient."""
    return wait(all_to_all_start(x, received, sent, group))


def all_to_all_grad(x: Tensor, group: ProcessGroup, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
    """The same, of equal parts unless the rows are given; the gradient goes back by the same way."""
    equal = [len(x) // group.size()] * group.size()
    return funcol.wait_tensor(funcol.all_to_all_single_autograd(x, received or equal, sent or equal, group))


def hand_on_start(parts: list[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Begin to hand tensors on to the next rank of a ring, together; `wait` then gives those of the rank before. No gradient."""
    return _hand_on_op(parts, group.group_name)


@torch.library.custom_op("reedling::hand_on", mutates_args=())
def _hand_on_op(parts: list[Tensor], group_name: str) -> list[Tensor]:
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    ahead, behind = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    sent = [x.clone(memory_format=torch.contiguous_format) for x in parts]  # a compiled graph may write into its own before they are sent
    received = [torch.empty_like(x) for x in sent]
    works = dist.batch_isend_irecv([op for tag, (x, y) in enumerate(zip(sent, received, strict=True)) for op in (
        dist.P2POp(dist.isend, x, group=group, group_peer=ahead, tag=tag),
        dist.P2POp(dist.irecv, y, group=group, group_peer=behind, tag=tag))])
    for i, y in enumerate(received):
        for work in works if len(works) == 1 else works[2 * i:2 * i + 2]:  # NCCL makes one of all
            _register_work(y, work)
    return received


@_hand_on_op.register_fake
def _(parts: list[Tensor], group_name: str) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in parts]


def sum_over_ranks(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum over the ranks, in place."""
    dist.all_reduce(x, group=group)
    return x


def any_rank(flag: bool, device: torch.device, group: ProcessGroup | None = None) -> bool:
    """Whether the flag is set on at least one rank."""
    return bool(sum_over_ranks(torch.tensor(int(flag), device=device), group).item())


def every_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on all ranks."""
    return not any_rank(not flag, device)


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in the order of ranks, on every rank. Pickles: for small things between steps."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first_rank(value: Any, group: ProcessGroup | None = None) -> Any:
    """The first rank's value, on every rank. Pickles."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def broadcast(x: Tensor, group: ProcessGroup, source: int = 0) -> Tensor:
    """The tensor of one rank of the group, by default the first, written into that of every rank."""
    dist.broadcast(x, group=group, group_src=source)
    return x


def wait_for_all() -> None:
    """Returns when every rank has called it."""
    dist.barrier()


def host_group() -> ProcessGroup:
    """A group of all ranks for host tensors, which does not wait for the devices."""
    return dist.new_group(backend="gloo")
