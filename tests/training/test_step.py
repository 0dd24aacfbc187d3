"""One training step on one process against plain formulas: the global mean loss, torch's AdamW, and the buffers of every layer."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import Config
from model import params, speech_lm
from parallel.mesh import Mesh, make_mesh, start_processes
from tests.dist.first import gradient_error
from tests.dist.first_worker import rows
from training import config
from training.engine import Engine, Pass
from training.state import State, init_state
from training.step import make_context, make_engine, make_gradients, make_state, make_step, numbered

ROW = "{tokens: 256, audio_frames: 176, utterances: 6, utterance_frames: 32, label_tokens: 16}"
SMALL = ["+experiment=digits", "compile.enabled=false", f"data.rows=[{ROW}]", "model.encoder.n_layers=2",
         "model.encoder.conv_norm=batch_norm", "model.decoder.pattern=ME", "model.decoder.bias_update_rate=0.01", "train.steps=5",
         "train.ctc_weight=0.3", "optimizer.warmup_steps=2", "optimizer.weight_decay=0.1", "optimizer.clip_norm=0.5"]


@pytest.fixture(scope="module")
def parts() -> tuple[Config, Mesh, Engine]:
    start_processes(torch.device("cpu"))
    cfg, _ = config.load(SMALL)
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    return cfg, mesh, make_engine(cfg, mesh)


def start(cfg: Config, mesh: Mesh) -> State:
    return init_state(speech_lm.spec(cfg), cfg.seed, mesh)


def test_bf16_masters_have_the_gradients_of_fp32_ones_unrounded() -> None:
    start_processes(torch.device("cpu"))
    found = []
    for more in ([], ["optimizer.master_dtype=bf16", "optimizer.moment_dtype=bf16"]):
        cfg, _ = config.load([*SMALL, "precision=bf16", *more])
        mesh = make_mesh(cfg.parallel, torch.device("cpu"))
        engine, state = make_engine(cfg, mesh), make_state(cfg, mesh)
        found.append(make_gradients(cfg, mesh, engine)(state, rows(cfg, 0)).grads)
    for name, grad in found[0].items():
        assert torch.equal(found[1][name], grad), name
    state, _ = make_step(cfg, mesh, engine)(state, rows(cfg, 0))
    assert {t.dtype for tensors in (state.params, state.first, state.second) for t in tensors.values()} == {torch.bfloat16}
    assert all(moment.to_local().any() for moment in state.second.values())


def test_moments_are_stored_as_configured_whatever_the_masters_are() -> None:
    start_processes(torch.device("cpu"))
    cfg, _ = config.load([*SMALL, "model.encoder.n_layers=1", "model.decoder.pattern=M", "precision=bf16", "optimizer.moment_dtype=bf16"])
    state = make_state(cfg, make_mesh(cfg.parallel, torch.device("cpu")))
    stored = [{t.dtype for t in tensors.values()} for tensors in (state.params, state.first, state.second)]
    assert stored == [{torch.float32}, {torch.bfloat16}, {torch.bfloat16}]


def test_gradients_travel_as_configured() -> None:
    start_processes(torch.device("cpu"))
    for name, sums in (("fp32", None), ("bf16", torch.bfloat16)):
        cfg, _ = config.load([*SMALL, "precision=bf16", f"parallel.reduce_dtype={name}"])
        engine = make_engine(cfg, make_mesh(cfg.parallel, torch.device("cpu")))
        assert {group.sums for unit in engine.units.values() for group in unit.groups} == {sums}


def test_loss_is_one_mean_over_all_micro_batches() -> None:
    """Labels count alike wherever they are, and the loss that balances experts is a mean of micro-batches."""
    start_processes(torch.device("cpu"))
    cfg, _ = config.load([*SMALL, "model.decoder.pattern=EME", "model.decoder.aux_loss_coeff=0.2"])
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    engine = make_engine(cfg, mesh)
    state, batches = start(cfg, mesh), rows(cfg, 0)
    got = make_gradients(cfg, mesh, engine)(state, batches)
    leaves, lm, ctc, balance, frames = state.leaves(), torch.zeros(()), torch.zeros(()), torch.zeros(()), 0.0
    for batch in batches:
        run = Pass(engine, leaves, make_context(cfg, batch, mesh, training=True))
        _, losses, stats = speech_lm.part(run, speech_lm.whole(cfg.model), None, batch, run.context, cfg)
        lm, ctc, balance = lm + losses["lm"], ctc + losses["ctc"], balance + losses["balance"]
        frames += stats["encoder.layers.1.frames"].item()
    utterances = sum(int((b["ctc_lengths_U"] > 0).sum()) for b in batches)
    tokens = sum(int((b["labels_T"] >= 0).sum()) for b in batches)  # transcripts and one end token each
    expected = lm / tokens + 0.3 * ctc / (tokens - utterances) + 0.2 * balance / len(batches)
    assert got.sums["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert got.sums["loss_ctc"].item() == pytest.approx(ctc.item() / (tokens - utterances), rel=1e-6)
    assert got.sums["loss_balance"].item() == pytest.approx(balance.item() / len(batches), rel=1e-6)
    assert len(batches) > 1
    assert got.sums["encoder.layers.1.frames"].item() == frames
    assert got.counts["lm"].item() == tokens
    weights = [leaves[name] for name in state.params]
    reference = dict(zip(state.params, torch.autograd.grad(expected, weights), strict=True))
    assert gradient_error(got.grads, reference) < 2e-3  # a bias before a batch norm has rounding alone


def test_steps_are_torch_adamw_with_clipping_and_warm_up(parts: tuple[Config, Mesh, Engine]) -> None:
    cfg, mesh, engine = parts
    state, gradients, step = start(cfg, mesh), make_gradients(cfg, mesh, engine), make_step(cfg, mesh, engine)
    theirs: dict[str, Tensor] = {name: w.full_tensor().clone().requires_grad_() for name, w in state.params.items()}
    decays = {name: p.decay for name, p in params.named_leaves(speech_lm.spec(cfg))}
    assert {True, False} == {decays[name] for name in theirs}
    groups = [{"params": [w for name, w in theirs.items() if decays[name] is on], "weight_decay": 0.1 * on} for on in (True, False)]
    reference = torch.optim.AdamW(groups, betas=cfg.optimizer.betas, eps=cfg.optimizer.eps)
    for number, lr in enumerate((1e-3 / 3, 2e-3 / 3, 1e-3)):  # two steps of warm-up, then the highest rate
        batches = rows(cfg, number)
        grads = {name: g.clone() for name, g in gradients(state, batches).grads.items()}
        norm = math.sqrt(sum(g.double().square().sum().item() for g in grads.values()))
        assert norm > 0.5
        for name, w in theirs.items():
            w.grad = grads[name] * (0.5 / norm)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        state, metrics = step(state, batches)
        assert state.step == number + 1
        assert metrics["grad_norm"].item() == pytest.approx(norm, rel=1e-5)
        for name, w in theirs.items():
            torch.testing.assert_close(state.params[name].full_tensor(), w.detach(), rtol=1e-5, atol=2e-6, msg=name)


def test_a_step_updates_the_buffers_of_every_layer(parts: tuple[Config, Mesh, Engine]) -> None:
    cfg, mesh, engine = parts
    before = start(cfg, mesh)
    after, sums = make_step(cfg, mesh, engine)(before, rows(cfg, 0))
    assert cfg.model.encoder is not None
    assert len(after.buffers) == 2 * cfg.model.encoder.n_layers + 1
    for i in range(cfg.model.encoder.n_layers):
        path = f"encoder.layers.{i}"
        mean = sums[f"{path}.sum"] / sums[f"{path}.frames"]
        torch.testing.assert_close(after.buffers[f"{path}.conv.batch_norm.running_mean"], 0.1 * mean)
        assert not torch.equal(after.buffers[f"{path}.conv.batch_norm.running_var"], before.buffers[f"{path}.conv.batch_norm.running_var"])
    load = sums["decoder.layers.1.expert_load"]
    torch.testing.assert_close(after.buffers["decoder.layers.1.router.bias"], 0.01 * torch.sign(load.mean() - load))


def test_frozen_parameters_cost_nothing_and_change_nothing(parts: tuple[Config, Mesh, Engine]) -> None:
    cfg, mesh, engine = parts
    frozen, _ = config.load([*SMALL, r"model.freeze_params=['^decoder\.layers','^encoder\.','^projector']",
                             r"model.prevent_freeze_params=['.*\.norm$']"])
    state = start(frozen, mesh)
    assert set(state.params) == set(start(cfg, mesh).params)
    left = {name for name in state.params if name.endswith("layers.0.norm") or name.endswith("layers.1.norm")
            or name.startswith(("decoder.embedding", "decoder.head", "ctc"))}
    assert set(state.first) == set(state.second) == set(state.trained) == left
    assert {name for name, leaf in state.leaves().items() if leaf.requires_grad} == left
    batches, before = rows(cfg, 0), {name: w.full_tensor().clone() for name, w in state.params.items()}
    got = make_gradients(frozen, mesh, make_engine(frozen, mesh))(state, batches)
    reference = make_gradients(cfg, mesh, engine)(start(cfg, mesh), batches).grads
    assert set(got.grads) == left
    assert all(torch.equal(got.grads[name], reference[name]) for name in left)
    after, _ = make_step(frozen, mesh, make_engine(frozen, mesh))(state, batches)
    assert {name for name, w in after.params.items() if not torch.equal(w.full_tensor(), before[name])} == left


LORA = [r"model.freeze_params=['^decoder','^encoder','^projector','ctc']", "model.encoder.conv_norm=layer_norm", "model.lora.rank=4",
        r"model.lora.targets=['decoder\.layers\.\d\.in_proj','.*linear_q']", "model.lora.dropout=0.4", "optimizer.lr=0.01"]


def test_adapters_alone_are_trained_and_dropout_is_drawn_anew_in_every_row_and_step(parts: tuple[Config, Mesh, Engine]) -> None:
    mesh = parts[1]
    cfg, _ = config.load([*SMALL, *LORA])
    state = start(cfg, mesh)
    adapted = ("decoder.layers.0.in_proj", *(f"encoder.layers.{i}.self_attn.linear_q.weight" for i in range(2)))
    assert set(state.trained) == {f"{path}_lora.{name}" for path in adapted for name in "ab"}
    engine = make_engine(cfg, mesh)
    gradients, step = make_gradients(cfg, mesh, engine), make_step(cfg, mesh, engine)
    for number in range(2):
        state, _ = step(state, rows(cfg, number))  # now b is not zero and dropout matters
    batches = rows(cfg, 3)
    once = gradients(state, batches)
    again = gradients(state, batches)
    assert all(torch.equal(once.grads[name], again.grads[name]) for name in once.grads)
    later = gradients(State(state.step + 1, state.params, state.buffers, state.first, state.second), batches)
    assert later.sums["loss"] != once.sums["loss"]
    swapped = gradients(state, batches[::-1])
    assert abs(swapped.sums["loss"] - once.sums["loss"]) > 1e-6 * once.sums["loss"]
    before = {name: w.full_tensor().clone() for name, w in state.params.items()}
    after, _ = step(state, batches)
    assert {name for name, w in after.params.items() if not torch.equal(w.full_tensor(), before[name])} == set(state.trained)


def test_rows_are_numbered_by_step_and_data_rank_so_that_ranks_that_share_one_draw_alike() -> None:
    """Six steps of two rows on each of dp 3 x cp 2 ranks: what random draws depend on is another number for each row."""
    seen: dict[tuple[int, int, int], set[int]] = {}
    for rank in range(6):
        mesh: Any = SimpleNamespace(dp=3, dp_rank=rank // 2, device=torch.device("cpu"))
        for step in range(6):
            for batch in numbered([{"row": torch.tensor(row)} for row in range(2)], step, mesh):
                seen.setdefault((step, int(batch["row"]), mesh.dp_rank), set()).add(int(batch["draw"]))
    assert len(seen) == 6 * 2 * 3
    assert sorted(draw for draws in seen.values() for draw in draws) == list(range(6 * 2 * 3))
