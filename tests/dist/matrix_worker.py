"""Under torchrun: runs cells of the matrix one after the other and compares each with its reference in FOLDER.

usage: matrix_worker FOLDER PRECISION BACKEND CELL...
BACKEND is that of torch.compile for cells that are compiled.
"""

import functools
import hashlib
import json
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from configs.schema import Config
from kernels.linear import OPERANDS, use_libraries
from model import params, speech_lm
from model.stages import own_stages
from parallel import sharding
from parallel.collectives import gather_objects
from parallel.mesh import Mesh, make_mesh, start_processes
from tests.dist import deep_ep
from tests.dist.cells import Cell, batches, cells, joined_row
from tests.dist.first import gradient_error, worst
from tests.dist.launch import leave
from training.engine import Engine, Pass
from training.evaluation import evaluated_loss, validation_loss
from training.pipeline import from_end
from training.state import State
from training.step import Batch, make_context, make_engine, make_gradients, make_state, make_step, make_transfers, state_dtype

STEPS = 3


def whole(spec: dict[str, params.P], tensors: dict[str, Any], mesh: Mesh) -> dict[str, Tensor]:
    """Unsharded copies of parameters, or of gradients (which arrive as local shards)."""
    parts = {name: t if hasattr(t, "full_tensor") else sharding.from_local(spec[name], t.contiguous(), mesh) for name, t in tensors.items()}
    return of_all_stages({name: part.full_tensor().clone() for name, part in parts.items()}, mesh)


def of_all_stages(tensors: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The tensors of the whole pipeline; of one that two stages have, the numbers must be equal."""
    found: dict[str, Tensor] = {}
    for part in gather_objects(tensors, mesh.pp_group) if mesh.sizes.pp > 1 else [tensors]:
        for name, t in part.items():
            assert torch.equal(found.setdefault(name, t), t), f"{name} differs between two stages"
    return found


def run(cell: Cell, precision: str) -> dict[str, Any]:
    """Every whole gradient, the gradient norm and the number of collectives of the first step; all losses, and whole parameters and
    buffers after STEPS steps."""
    use_libraries(dict.fromkeys(OPERANDS, "mkl"))  # the same everywhere
    torch._dynamo.reset()
    cfg = cell.config(precision)
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    spec = dict(params.named_leaves(speech_lm.spec(cfg)))
    state: State = make_state(cfg, mesh)
    if cell.starved:
        for name, buffer in state.buffers.items():
            if name.endswith("router.bias"):
                buffer[len(buffer) // 2 :] = -100
    engine = make_engine(cfg, mesh)
    rows = batches(cfg, cell)[mesh.dp_rank * cfg.train.accumulate :][: cfg.train.accumulate]
    if cell.joined and mesh.world == 1:
        rows = [joined_row(cfg, cell)]
    comms = CommDebugMode()
    comms.comm_registry.add(torch.ops._c10d_functional.all_reduce_)
    with nullcontext() if cell.compiled else comms:  # nothing compiles under such a mode
        first = make_gradients(cfg, mesh, engine)(state, rows)
    grads, row = whole(spec, first.grads, mesh), batches(cfg, cell)[0]
    evaluated = [unsplit_loss(cfg, mesh, engine, state, row)]
    if not cell.compiled:  # whose evaluation would compile once more
        evaluated.append(torch.tensor(validation_loss(cfg, mesh, engine, state, [row])["loss"]).double())
    step, metrics = make_step(cfg, mesh, engine), []
    for _ in range(STEPS):
        state, figures = step(state, rows)
        metrics.append(figures)
    return {"grads": grads, "losses": torch.stack([m["loss"].double() for m in metrics]), "norm": metrics[0]["grad_norm"].double(),
            "evaluated": evaluated, "params": whole(spec, state.params, mesh), "buffers": of_all_stages(state.buffers, mesh),
            "collectives": {str(op).rpartition(".")[2].rstrip("_"): n for op, n in comms.get_comm_counts().items()}}


def unsplit_loss(cfg: Config, mesh: Mesh, engine: Engine, state: State, row: Batch) -> Tensor:
    """The loss of one row of which every rank of a stage computes all, as decoding does."""
    run = Pass(engine, state.leaves(), make_context(cfg, row, mesh, training=False, split=False), compiled=False)
    transfers = make_transfers(cfg, mesh)
    loss = evaluated_loss(run, row, cfg, own_stages(cfg, mesh.pp_rank), transfers, len(row["tokens_T"]))
    transfers.finish()
    return from_end(transfers, torch.zeros((), dtype=torch.float64) if loss is None else loss.double())


def errors(got: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """How far a cell is from its reference, and its collectives."""
    got = got | {key: without_padding(got[key], expected[key]) for key in ("grads", "params")}
    return {
        "collectives": got["collectives"],
        "loss_error": worst(relative(a, b) for a, b in zip([got["losses"], *got["evaluated"]], [expected["losses"], *expected["evaluated"]], strict=False)),
        "gradient_error": gradient_error(got["grads"], expected["grads"]),
        "norm_error": relative(got["norm"], expected["norm"]),
        "state_error": gradient_error(got["params"] | floats(got["buffers"]), expected["params"] | floats(expected["buffers"])),
    }


def without_padding(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tables have rows of zeros beyond the vocabulary, more of them under tensor parallelism."""
    if any(t[len(expected[name]) :].any() for name, t in got.items()):
        raise ValueError("rows that pad the vocabulary have changed")
    return {name: t[: len(expected[name])] for name, t in got.items()}


def floats(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if t.is_floating_point()}


def relative(a: Tensor, b: Tensor) -> float:
    """The largest relative difference."""
    return ((a - b).abs() / b.abs()).max().item()


def file_of(folder: str, cell: Cell, precision: str) -> Path:
    """Where a reference is kept."""
    return Path(folder) / f"{hashlib.sha256(cell.name.encode()).hexdigest()[:16]}_{precision}.pt"


def measured(cell: Cell, precision: str, folder: str) -> dict[str, Any]:
    """The errors of a cell, or what stopped it."""
    try:
        return errors(run(cell, precision), torch.load(file_of(folder, cell.reference, precision)))
    except Exception:
        return {"failure": traceback.format_exc(limit=-4)}


def main() -> None:
    folder, precision, backend, *names = sys.argv[1:]
    sys.modules["deep_ep"] = deep_ep  # whether it is installed or not
    start_processes(torch.device("cpu"))
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        results = {cell.name: measured(cell, precision, folder) for cell in cells() if cell.name in names}
    leave(results)


if __name__ == "__main__":
    main()
