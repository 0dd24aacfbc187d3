"""One case through everything: owner's weights on disk -> ours -> logits, loss, gradients; and back to a folder that the owner opens."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from model.hub.family import entries
from model.hub.files import Folder
from model.hub.load import Loaded, load
from model.hub.save import foreign, save
from model.params import P
from tests.dist.first import gradient_error
from tests.parity import owners, speech, text
from tests.parity.results import Result, relative_error, single_mesh

SPEECH = "glmasr"
CASES = (*owners.CASES, SPEECH)


@dataclass(frozen=True)
class Errors:
    """What a case is off by; `differing` names tensors of exports and generated tokens, which must be equal and are not."""

    logits: float  # largest difference over the largest logit
    loss: float
    gradients: float  # largest of any foreign tensor, as tests/dist/first.py defines it
    differing: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return self.logits <= 1e-5 and self.loss <= 1e-6 and self.gradients <= 1e-4 and not self.differing


def check(transformers: ModuleType, name: str, folder: Path) -> Errors:
    """Both directions of one case."""
    kind = speech if name == SPEECH else text
    model = speech.make_glm_asr(transformers) if name == SPEECH else owners.make(transformers, name)
    model.save_pretrained(folder / "theirs")
    loaded = load(folder / "theirs", single_mesh())
    theirs: Result = kind.theirs(model)
    ours: Result = kind.ours(loaded)
    write_gradients(model, folder / "gradients")
    return Errors(
        relative_error(ours.logits, theirs.logits), abs(ours.loss - theirs.loss) / abs(theirs.loss),
        gradient_error(*foreign_gradients(loaded, ours.grads, folder / "gradients")), tuple(round_trip(kind, model, loaded, folder)))


def write_gradients(model: Any, folder: Path) -> None:
    """The owner's gradients as a checkpoint, so that they come in the layout of the owner's files."""
    with torch.no_grad():
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.copy_(p.grad)
        model.save_pretrained(folder)
        for name, p in model.named_parameters():
            p.copy_(values[name])


def foreign_gradients(loaded: Loaded, grads: dict[str, Tensor], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Ours and the owner's, by the owner's names and in the layout of the owner's files."""
    found = list(entries(loaded.family.variants[0], loaded.cfg, loaded.family.part))
    with Folder(folder) as stored:
        theirs = {b.name: stored.read(b.name, [slice(None)] * len(b.shape)) for e in found if e.p.kind == "param" for b in e.blocks}
    return {b.name: foreign(grads[e.path], b) for e in found if e.p.kind == "param" for b in e.blocks}, theirs


def round_trip(kind: Any, model: Any, loaded: Loaded, folder: Path) -> list[str]:
    """What differs after import and export, with the original folder beside and from our configuration alone."""
    def fetch(path: str, p: P) -> Tensor:
        t = loaded.tensors[path]
        return t if p.kind == "buffer" else t.full_tensor()

    differing, tokens = [], kind.generate(model)
    for which, like in (("like", folder / "theirs"), ("alone", None)):
        save(folder / which, loaded.family, loaded.cfg, fetch, like=like, more={} if like else {"audio_token_id": speech.AUDIO_ID},
             dtype=torch.float32, limit_bytes=30_000)
        again = type(model).from_pretrained(folder / which, attn_implementation="eager")
        before, after = model.state_dict(), again.state_dict()
        differing += [f"{which}: {name}" for name in sorted(before.keys() | after.keys())
                      if name not in before or name not in after or not torch.equal(before[name], after[name])]
        again.generation_config.eos_token_id = model.generation_config.eos_token_id
        if not torch.equal(kind.generate(again), tokens):
            differing.append(f"{which}: generated tokens")
    return differing if torch.equal(kind.predict(loaded, tokens), tokens) else [*differing, "our tokens"]
