"""One case through everything: owner's weights on disk -> ours -> logits, loss, gradients; and back to a folder that the owner opens."""

import math
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from configs.schema import CompileConfig, Config, ParallelConfig
from model import decoder, params, speech_lm
from model.context import Context
from model.hub.family import entries
from model.hub.files import Folder
from model.hub.load import Loaded, load
from model.hub.save import foreign, save
from parallel.mesh import Mesh, make_mesh, start_processes
from tests.model.token_rows import token_row
from tests.parity import owners
from training.engine import Engine, Pass

PROMPT, GENERATED = 5, 12  # tokens


@dataclass(frozen=True)
class Errors:
    """What a case is off by; `broken` names what must be equal and is not."""

    logits: float  # largest difference over the largest logit
    loss: float
    gradients: float  # largest of any foreign tensor, by the floor of tests/dist/first.py
    broken: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return self.logits <= 1e-5 and self.loss <= 1e-6 and self.gradients <= 1e-4 and not self.broken


def single_mesh() -> Mesh:
    """The mesh of this process alone."""
    start_processes(torch.device("cpu"))
    return make_mesh(ParallelConfig(), torch.device("cpu"))


def check(transformers: ModuleType, name: str, folder: Path) -> Errors:
    """Both directions of one case."""
    model, mesh = owners.make(transformers, name), single_mesh()
    model.save_pretrained(folder / "theirs")
    loaded = load(folder / "theirs", mesh)
    utterances = owners.utterances()
    theirs = owners.evaluate(model, lambda u: model(utterances[u][0][None]).logits[0], [labels for _, labels in utterances])
    ours = evaluate(loaded, mesh, utterances)
    write_gradients(model, folder / "gradients")
    return Errors(
        ((ours.logits - theirs.logits).abs().max() / theirs.logits.abs().max()).item(), abs(ours.loss - theirs.loss) / abs(theirs.loss),
        gradient_error(loaded, ours.grads, folder / "gradients"), tuple(round_trip(model, loaded, mesh, folder)))


def leaves(loaded: Loaded) -> dict[str, Tensor]:
    """The whole parameters, ready for gradients, and the buffers."""
    spec = dict(params.named_leaves(speech_lm.model_spec(loaded.cfg)))
    return {name: t.to_local().requires_grad_() if spec[name].kind == "param" else t for name, t in loaded.tensors.items()}


def evaluate(loaded: Loaded, mesh: Mesh, utterances: list[tuple[Tensor, Tensor]]) -> owners.Result:
    """All utterances in one packed row, with padding behind them."""
    weights = leaves(loaded)
    lengths = [len(ids) for ids, _ in utterances]
    total, padding = sum(lengths), 9
    shifted = torch.cat([torch.cat([labels[1:], labels.new_tensor([-100])]) for _, labels in utterances])
    batch = {"tokens_T": torch.cat([*(ids for ids, _ in utterances), torch.zeros(padding, dtype=torch.int64)]),
             "labels_T": torch.cat([shifted, torch.full((padding,), -100)])}
    ctx = token_row(loaded.cfg.decoder, lengths, padding)
    losses, _ = speech_lm.losses(runner(loaded, mesh, weights, ctx), batch, ctx, Config(model=loaded.cfg))
    loss = losses["lm"] / (shifted != -100).sum()
    trained = {name: w for name, w in weights.items() if w.requires_grad}
    grads = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
    return owners.Result(logits(loaded, mesh, weights, batch["tokens_T"], ctx)[:total].detach(), loss.item(), grads)


def runner(loaded: Loaded, mesh: Mesh, weights: dict[str, Tensor], ctx: Context) -> Pass:
    """What runs the model's functions, eagerly."""
    cfg = Config(model=loaded.cfg)
    engine = Engine(speech_lm.spec(cfg), speech_lm.units(cfg), mesh, torch.float32, True, CompileConfig(enabled=False))
    return Pass(engine, weights, ctx)


def logits(loaded: Loaded, mesh: Mesh, weights: dict[str, Tensor], tokens_T: Tensor, ctx: Context) -> Tensor:
    """fp32 logits of all slots of a text row."""
    run = runner(loaded, mesh, weights, ctx)
    x_TD = speech_lm.decode(run, None, {"tokens_T": tokens_T}, ctx, {})
    return run(speech_lm.head_unit(loaded.cfg), decoder.logits, x_TD, torch.arange(len(tokens_T)))


def write_gradients(model: Any, folder: Path) -> None:
    """The owner's gradients as a checkpoint, so that they come in the layout of the owner's files."""
    with torch.no_grad():
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.copy_(p.grad)
        model.save_pretrained(folder)
        for name, p in model.named_parameters():
            p.copy_(values[name])


def gradient_error(loaded: Loaded, grads: dict[str, Tensor], folder: Path) -> float:
    """norm(g - r) / max(norm(r), 1e-3 norm(all r) / sqrt(number of tensors)), the largest of any foreign tensor."""
    rows = loaded.family.variants[0]
    with Folder(folder) as stored:
        pairs = [(foreign(grads[e.path], b).double(), stored.read(b.name, [slice(None)] * len(b.shape)).double())
                 for e in entries(rows, loaded.cfg, loaded.family.part) if e.p.kind == "param" for b in e.blocks]
    floor = 1e-3 * math.sqrt(sum(r.square().sum().item() for _, r in pairs)) / math.sqrt(len(pairs))
    return max((g - r).norm().item() / max(r.norm().item(), floor) for g, r in pairs)


def round_trip(model: Any, loaded: Loaded, mesh: Mesh, folder: Path) -> list[str]:
    """What differs after import and export, with the original folder beside and from our configuration alone."""
    def fetch(path: str, p: params.P) -> Tensor:
        t = loaded.tensors[path]
        return t if p.kind == "buffer" else t.full_tensor()

    broken, prompt = [], torch.arange(3, 3 + PROMPT)[None]
    tokens = model.generate(prompt, max_new_tokens=GENERATED, do_sample=False)[0]
    for which, like in (("like", folder / "theirs"), ("alone", None)):
        save(folder / which, loaded.family, loaded.cfg, fetch, like=like, dtype=torch.float32, limit_bytes=30_000)
        again = type(model).from_pretrained(folder / which, attn_implementation="eager")
        before, after = model.state_dict(), again.state_dict()
        broken += [f"{which}: {name}" for name in before.keys() | after.keys()
                   if name not in before or name not in after or not torch.equal(before[name], after[name])]
        again.generation_config.eos_token_id = model.generation_config.eos_token_id
        if again.generate(prompt, max_new_tokens=GENERATED, do_sample=False)[0].tolist() != tokens.tolist():
            broken.append(f"{which}: generated tokens")
    ctx = token_row(loaded.cfg.decoder, [len(tokens) - 1])
    ours = logits(loaded, mesh, leaves(loaded), tokens[:-1], ctx)[PROMPT - 1 :].argmax(-1)
    return broken if ours.tolist() == tokens[PROMPT:].tolist() else [*broken, "our tokens"]


