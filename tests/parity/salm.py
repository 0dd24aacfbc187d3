"""A whole speech model that NeMo's SALM has saved, from samples to logits, loss, gradients and generated tokens, against SALM's own values;
tests/goldens/make_salm.py says how they came about."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from safetensors.torch import load_file
from torch import Tensor

from configs.schema import CompileConfig, Config, RowSize
from data.packing import AUDIO, Example, pack_row
from model import decoder, speech_lm
from model.context import Context
from model.hub.family import choose_variant
from model.hub.files import Folder
from model.hub.load import Loaded, load
from model.hub.save import foreign, save
from model.params import P
from parallel.gather import Reshard
from tests.dist.first import gradient_error
from tests.goldens import make_salm
from tests.parity import results
from tests.parity.check import Errors
from training.engine import Engine
from training.generation import Weights, generate
from training.step import make_context

GOLDENS = Path(make_salm.__file__).parent
LIKE = {"like": GOLDENS / "salm", "alone": None}  # the folder beside which an export is written
ROW = RowSize(tokens=60, audio_frames=40, utterances=3, utterance_frames=20, label_tokens=4)


@dataclass(frozen=True)
class Whole:
    """SALM's folder as we load it, and what SALM made of its conversations."""

    loaded: Loaded
    cfg: Config
    golden: dict[str, Tensor]

    def row(self, answers: bool) -> tuple[dict[str, Tensor], Context]:
        """The conversations in a packed row, with or without what answers them."""
        examples = []
        for clip, prompt, answer in zip(make_salm.CLIPS, make_salm.PROMPTS, make_salm.ANSWERS, strict=True):
            samples = soundfile.read(f"data/speech/audio/{clip}", dtype="float32")[0]
            said = answer if answers else []
            ids = [AUDIO if i == make_salm.AUDIO else i for i in prompt]
            examples.append(Example(clip, ids, said[:-1], said[-1:], np.asarray(samples)))
        batch = {name: torch.from_numpy(x) for name, x in pack_row(examples, ROW).items()}
        return batch, make_context(self.cfg, batch, results.single_mesh(), training=False)


def load_whole() -> Whole:
    """The model and its recorded values."""
    loaded = load(GOLDENS / "salm", results.single_mesh())
    cfg = Config(model=loaded.cfg)
    cfg.precision, cfg.train.ctc_weight, cfg.data.rows, cfg.generation.max_new_tokens = "fp32", 0, [ROW], make_salm.NEW
    return Whole(loaded, cfg, load_file(GOLDENS / "salm.safetensors"))


def errors(whole: Whole) -> tuple[float, float, float]:
    """Of logits, loss and gradients, as `Errors` defines them."""
    batch, ctx = whole.row(answers=True)
    weights = results.leaves(whole.loaded)
    # norms as in evaluation, where a plain call would cut the gradients
    run, again = (results.runner(whole.loaded, weights, ctx)._call for _ in range(2))
    x_TD, losses, _ = speech_lm.part(run, speech_lm.whole(whole.cfg.model), None, batch, ctx, whole.cfg)
    logits = again(speech_lm.head_unit(whole.cfg.model), decoder.logits, x_TD, torch.arange(ROW.tokens))
    first, second, end, _ = ctx.cu_seqlens_U1.tolist()
    result = results.ours(torch.cat([logits[first : second - 1], logits[second : end - 1]]), losses["lm"], weights)
    loss = whole.golden["loss"].item()
    with Folder(GOLDENS / "salm") as stored:
        found = choose_variant(whole.loaded.family, whole.loaded.cfg, stored.shapes())
    ours = {b.name: foreign(result.grads[e.path], b) for e in found if e.p.kind == "param" for b in e.blocks}
    theirs = {name.removeprefix("gradients."): t for name, t in whole.golden.items() if name.startswith("gradients.")}
    assert ours.keys() == theirs.keys()
    return results.relative_error(result.logits, whole.golden["logits"]), abs(result.loss - loss) / abs(loss), gradient_error(ours, theirs)


def generated(whole: Whole) -> list[list[int]]:
    """Our answers to the conversations."""
    batch, ctx = whole.row(answers=False)
    mesh = results.single_mesh()
    engine = Engine(speech_lm.spec(whole.cfg), speech_lm.units(whole.cfg), mesh, torch.float32, Reshard(), CompileConfig(enabled=False))
    weights = Weights(whole.cfg, mesh, engine, results.leaves(whole.loaded))
    return generate(weights, batch, ctx, longest=30, stop_ids=[-1], names=make_salm.CLIPS)


def differing(whole: Whole, which: str, folder: Path) -> list[str]:
    """Names of tensors of our export that are not those of SALM's own file, but for what it holds beyond parameters and statistics."""
    def fetch(path: str, p: P) -> Tensor:
        t: Any = whole.loaded.tensors[path]
        return t if p.kind == "buffer" else t.full_tensor()

    save(folder, whole.loaded.family, whole.loaded.cfg, fetch, like=LIKE[which], dtype=torch.float32)
    before, after = load_file(GOLDENS / "salm" / "model.safetensors"), load_file(folder / "model.safetensors")
    if which == "alone":
        before["llm.model.embed_tokens.weight"] = before.pop("embed_tokens.weight")
    wanted = {name: t for name, t in before.items() if "featurizer" not in name and "num_batches" not in name}
    return [f"{which}: {name}" for name in sorted(wanted.keys() | after.keys())
            if name not in wanted or name not in after or not torch.equal(after[name], wanted[name])]


def check(folder: Path) -> Errors:
    """All of it. Exports are compared with SALM's file, not opened with its class: NeMo is not installed beside us."""
    whole = load_whole()
    names = [name for which in LIKE for name in differing(whole, which, folder / which)]
    return Errors(*errors(whole), (*names, *(() if generated(whole) == whole.golden["tokens"].tolist() else ("our tokens",))))
