"""In which order the graphs of a layer of experts begin exchanges, wait for them and compute."""

import functools
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from configs.schema import DecoderConfig, EncoderConfig
from model import moe, params
from model.context import Context
from training.recompute import recomputed

NAMES = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter", "all_to_all_single": "exchange", "wait_tensor": "wait",
         "experts": "experts", "experts_backward": "experts", "product_nt": "shared", "product_nn": "shared", "product_tn": "shared"}


def order(dispatch: str, policy: str) -> dict[str, list[str]]:
    """What the forward and the backward graph do one after the other, the same things in a row named once."""
    found: dict[str, list[str]] = {}

    def note(way: str, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        called = [str(n.target).split(".")[1] for n in graph.graph.nodes if n.op == "call_function" and str(n.target).count(".") == 2]
        found[way] = [name for name, _ in groupby(NAMES[name] for name in called if name in NAMES)]
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=functools.partial(note, "forward"), bw_compiler=functools.partial(note, "backward"),
                           partition_fn=min_cut_rematerialization_partition)
    layer = moe.forward if policy == "none" else recomputed(moe.forward, policy)
    x_TD, _ = torch.compile(layer, fullgraph=True, dynamic=False, backend=backend)(*inputs(dispatch))
    x_TD.sum().backward()
    return found


def inputs(dispatch: str) -> tuple[params.Tree, Tensor, Context]:
    """Weights of which this rank has its experts, tokens, and their boundaries."""
    cfg, tokens, ranks = DecoderConfig(d_model=16, n_experts=8, top_k=2, moe_ffn=16, shared_ffn=20, pattern="E"), 24, dist.get_world_size()

    def drawn(path: str, p: params.P) -> Tensor:
        shape = (p.shape[0] // ranks, *p.shape[1:]) if path.startswith("experts.") else p.shape
        return torch.randn(shape).requires_grad_(p.kind != "buffer")

    none = torch.zeros(0, dtype=torch.int64)
    ctx = Context(EncoderConfig(), cfg, torch.tensor([0, tokens], dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32), none, none, none,
                  none, none, none, 0, ep_group=dist.group.WORLD, ep_dispatch=dispatch, keep_hidden=False)
    return params.map_named(drawn, moe.spec(cfg)), torch.randn(tokens, cfg.d_model, requires_grad=True), ctx
