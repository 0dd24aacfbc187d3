"""A whole speech model that NeMo's SALM has saved, from samples to logits, loss, gradients and generated tokens, against SALM's own values;
tests/goldens/make_salm.py says how they came about."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
from tests.goldens import make_salm
from tests.parity import results
from training.engine import Engine
from training.generation import Weights, generate
from training.step import make_context

GOLDENS = Path(make_salm.__file__).parent
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


@pytest.fixture(scope="module")
def whole() -> Whole:
    loaded = load(GOLDENS / "salm", results.single_mesh())
    cfg = Config(model=loaded.cfg)
    cfg.precision, cfg.train.ctc_weight, cfg.data.rows, cfg.generation.max_new_tokens = "fp32", 0, [ROW], make_salm.NEW
    return Whole(loaded, cfg, load_file(GOLDENS / "salm.safetensors"))


def test_logits_loss_and_gradients_are_those_of_salm(whole: Whole) -> None:
    batch, ctx = whole.row(answers=True)
    weights = results.leaves(whole.loaded)
    # norms as in evaluation, where a plain call would cut the gradients
    run, again = (results.runner(whole.loaded, weights, ctx)._call for _ in range(2))
    x_TD, losses, _ = speech_lm.part(run, speech_lm.whole(whole.cfg.model), None, batch, ctx, whole.cfg)
    logits = again(speech_lm.head_unit(whole.cfg.model), decoder.logits, x_TD, torch.arange(ROW.tokens))
    first, second, end, _ = ctx.cu_seqlens_U1.tolist()
    ours = torch.cat([logits[first : second - 1], logits[second : end - 1]])
    assert (ours - whole.golden["logits"]).abs().max() <= 1e-5 * whole.golden["logits"].abs().max()
    result = results.ours(ours, losses["lm"], weights)
    assert result.loss == pytest.approx(whole.golden["loss"].item(), rel=1e-6)
    with Folder(GOLDENS / "salm") as stored:
        found = choose_variant(whole.loaded.family, whole.loaded.cfg, stored.shapes())
    pairs = [(foreign(result.grads[e.path], b), whole.golden[f"gradients.{b.name}"])
             for e in found if e.p.kind == "param" for b in e.blocks]
    assert len(pairs) == sum(name.startswith("gradients.") for name in whole.golden)
    floor = 1e-3 * math.sqrt(sum(r.square().sum().item() for _, r in pairs) / len(pairs))
    assert max(((g - r).norm() / max(r.norm().item(), floor)).item() for g, r in pairs) <= 1e-4


def test_generated_tokens_are_those_of_salm(whole: Whole) -> None:
    batch, ctx = whole.row(answers=False)
    mesh = results.single_mesh()
    engine = Engine(speech_lm.spec(whole.cfg), speech_lm.units(whole.cfg), mesh, torch.float32, Reshard(), CompileConfig(enabled=False))
    weights = Weights(whole.cfg, mesh, engine, results.leaves(whole.loaded))
    answers = generate(weights, batch, ctx, longest=30, stop_ids=[-1], names=make_salm.CLIPS)
    assert answers == whole.golden["tokens"].tolist()
    assert len({token for answer in answers for token in answer}) > 4


@pytest.mark.parametrize("like", [GOLDENS / "salm", None], ids=["like", "alone"])
def test_its_export_holds_the_same_numbers(whole: Whole, like: Path | None, tmp_path: Path) -> None:
    def fetch(path: str, p: P) -> Tensor:
        t: Any = whole.loaded.tensors[path]
        return t if p.kind == "buffer" else t.full_tensor()

    save(tmp_path, whole.loaded.family, whole.loaded.cfg, fetch, like=like, dtype=torch.float32)
    before, after = load_file(GOLDENS / "salm" / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    if like is None:
        before["llm.model.embed_tokens.weight"] = before.pop("embed_tokens.weight")
    wanted = {name: t for name, t in before.items() if "featurizer" not in name and "num_batches" not in name}
    assert after.keys() == wanted.keys()
    assert all(torch.equal(after[name], t) for name, t in wanted.items())
