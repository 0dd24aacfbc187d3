"""Runs a model's units: gathers their weights, calls the compiled function of each kind, and lets the weights go.

compile.scope "layer": the gathers stay outside, each function is compiled once with fullgraph, and all layers of a kind share the graph.
compile.scope "step": nothing is compiled here; the caller compiles the whole pass, and the gathers become part of its graph.
"""

import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from configs.schema import CompileConfig
from kernels.inductor import name_cached_graphs
from model import params
from model.params import Tree
from parallel.gather import Reshard, Shared, Unit, Use, gather_traced
from parallel.mesh import Mesh
from parallel.names import kept_share
from training import halves
from training.recompute import recomputed, within_budget

RECOMPILE_LIMIT = 64  # graphs a function: row sizes x (training, evaluation)

Function = Callable[..., Any]


def _as_it_is(fn: Function) -> Function:
    return fn


class Engine:
    """The static side: one `Unit` a group of parameters and one compiled function a kind of layer.

    :param units: in the order of use
    :param bind: wraps every function of weights (see model.lora.binder)
    :param recompute: policy of activation checkpointing by the start of a unit's path
    :param sums: dtype in which gradients travel and are added up; None: fp32 or wider
    :param apart: units before which a pass ends, so that none is gathered ahead there
    :param turns: whether backward starts with the last unit, right after its forward
    :param fetched: shards are on the host
    :param halved: backward comes in halves (see training.halves)
    """

    def __init__(self, spec: Tree, units: Iterable[tuple[str, ...]], mesh: Mesh, dtype: torch.dtype, reshard: Reshard,
                 compile: CompileConfig, bind: Callable[[Function], Function] = _as_it_is, recompute: Mapping[str, str] | None = None,
                 sums: torch.dtype | None = None, apart: Container[tuple[str, ...]] = (), turns: bool = True,
                 fetched: bool = False, halved: bool = False):
        self.compile, self.bind, self.recompute, self.halved = compile, bind, recompute or {}, halved
        self.order = list(units)
        self.after = {unit: later for unit, later in pairwise(self.order) if later not in apart}
        self.units: dict[tuple[str, ...], Unit] = {}
        self.joined: dict[tuple[str, ...], Unit] = {}  # for passes that do not split layers over tp
        self.paths: dict[tuple[str, ...], list[str]] = {}
        self.trees: dict[tuple[str, ...], pytree.TreeSpec] = {}
        last_use = {path: i for i, key in enumerate(self.order) for path in key}
        for i, key in enumerate(self.order):
            subtrees = {path.rpartition(".")[2]: params.subtree(spec, path) for path in key}
            tree = subtrees if len(key) > 1 else params.subtree(spec, key[0])
            leaves, self.trees[key] = pytree.tree_flatten(tree)
            self.paths[key] = [f"{path}.{name}" for path in key for name, _ in params.named_leaves(params.subtree(spec, path))]
            keep = Reshard(False, False) if turns and key == self.order[-1] else reshard
            used_later = any(last_use[path] > i for path in key)
            self.units[key] = Unit(leaves, mesh, dtype, keep, sums=sums, fetched=fetched, used_later=used_later)
            self.joined[key] = self.units[key] if mesh.tensor is None else Unit(leaves, mesh, dtype, keep, together=True, fetched=fetched)
        self._compiled: dict[Function, Function] = {}
        self.shares: dict[Function, float] = {}  # of functions whose compiler chooses what to keep
        # about the transform in the features, which is a call into a library and no loss
        warnings.filterwarnings("ignore", message="Torchinductor does not support code generation for complex operators")
        name_cached_graphs()
        if mesh.ep_group is not None:  # it would move the shared expert away from the exchange that it runs beside
            torch._inductor.config.reorder_for_peak_memory = False
        if mesh.device.type == "cpu" and dtype.itemsize == 2:  # else the backward of two layer norms reads what nobody wrote (torch 2.13)
            torch._inductor.config.cpp.max_horizontal_fusion_size = 1
        if halved:  # a graph whose backward comes again keeps what it was given
            torch._functorch.config.donated_buffer = False
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)

    def bound(self, fn: Function, key: tuple[str, ...]) -> Function:
        """`fn` as this unit runs it."""
        policy = next((policy for start, policy in self.recompute.items() if key[0].startswith(start)), "none")
        if policy == "none":
            return self.bind(fn)
        made, share = recomputed(self.bind(fn), policy), kept_share(policy)
        if share is not None:
            self.shares[made] = share
        return made

    def function(self, fn: Function) -> Function:
        """`fn`, compiled the first time it is asked for."""
        if not self.compile.enabled or self.compile.scope == "step":
            return fn
        if fn not in self._compiled:
            made = halves.compiled(fn) if self.halved else torch.compile(fn, fullgraph=True, dynamic=False)
            self._compiled[fn] = within_budget(made, self.shares[fn]) if fn in self.shares else made
        return self._compiled[fn]


class Pass:
    """One forward pass (and its backward): what `run` is to the model's functions.

    With context.training False each unit's output is cut from what made it, so that its activations go at once. Gradients stay enabled even
    then: evaluation runs the graphs that training has compiled.

    :param leaves: this rank's shard of every parameter and the whole buffers, by dotted path.
    :param context: handed to every function as its last argument.
    :param shared: what this pass has in common with the other micro-batches of its step.
    :param compiled: False runs everything eagerly, whatever the engine compiles.
    """

    def __init__(self, engine: Engine, leaves: dict[str, Tensor], context: Any, shared: Shared | None = None, compiled: bool = True):
        self.engine, self.leaves, self.context, self.shared, self.compiled = engine, leaves, context, shared or Shared(), compiled
        self.units = engine.joined if getattr(context, "tp_group", None) is None else engine.units
        self.last: Use | None = None
        self.ahead: Use | None = None  # the next unit, whose gathering has begun

    def __call__(self, key: tuple[str, ...] | None, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Call `fn(weights of key, *inputs, context)`; without a key `fn(*inputs, context)`."""
        out = self._call(key, fn, *inputs)
        return out if self.context.training else pytree.tree_map_only(Tensor, _cut, out)

    def _call(self, key: tuple[str, ...] | None, fn: Callable[..., Any], *inputs: Any) -> Any:
        if key is None:
            return self._function(fn)(*inputs, self.context)
        fn = self.engine.bound(fn, key)
        if self.compiled and self.engine.compile.one_graph:
            whole = gather_traced(self.units[key], self._shards(key))
            return fn(pytree.tree_unflatten(whole, self.engine.trees[key]), *inputs, self.context)
        call, use = self._function(fn), self._use(key)
        weights = use.weights()
        if self.ahead is not None and self.context.training:  # evaluation runs parts of the order: what is begun might never be used
            self.ahead.start()
        tree = pytree.tree_unflatten(weights, self.engine.trees[key])
        with use.saved() if use.unit.reshard else nullcontext():
            return call(tree, *inputs, self.context)

    def prepare_backward(self) -> None:
        """Begin to gather what backward needs first, while its gradient is on the way."""
        if self.last is not None and self.last.saved_any:
            self.last.start()

    @property
    def halved(self) -> bool:
        """Whether its backward comes in halves; what is not compiled has none."""
        return self.engine.halved and self.compiled and self.engine.compile.enabled

    def let_go(self) -> None:
        """Free what backward has gathered, though it comes again."""
        use = self.last
        while use is not None:
            use.whole, use = None, use.before

    def _function(self, fn: Function) -> Function:
        return self.engine.function(fn) if self.compiled else fn

    def _shards(self, key: tuple[str, ...]) -> list[Tensor]:
        return [self.leaves[path] for path in self.engine.paths[key]]

    def _use(self, key: tuple[str, ...]) -> Use:
        """This unit's use, which may be under way already; prepares the next one, to travel while this one computes."""
        use = self.ahead
        if use is None or use.unit is not self.units[key]:
            use = Use(self.units[key], self._shards(key), self.last, self.shared)
        after = self.engine.after.get(key)
        self.last, self.ahead = use, Use(self.units[after], self._shards(after), use, self.shared) if after else None
        return use


def _cut(t: Tensor) -> Tensor:
    return t.detach().requires_grad_() if t.requires_grad else t
