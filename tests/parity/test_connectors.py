"""What stands between encoder and language model, as NeMo's SALM has it: loaded from its names, against that definition made of layers of
transformers, each utterance alone; and back."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from configs.schema import EncoderConfig, ModelConfig, ProjectorConfig, QFormerConfig
from model import params, projector, speech_lm
from model.context import Context
from model.hub.families import FAMILIES
from model.hub.families.parakeet import PARAKEET
from model.hub.family import HubError, entries
from model.hub.load import load
from model.hub.save import save
from tests.goldens import perception
from tests.model.hub.test_nemo import CONFIG
from tests.model.hub.test_rows import drawn, model
from tests.model.rows import audio_row
from tests.parity.owners import randomise
from tests.parity.results import single_mesh

pytestmark = pytest.mark.parity
WIDTH, LLM = perception.ENCODER.d_model, 12
SECONDS = (1.3, 0.2, 0.7)


@dataclass(frozen=True)
class Owner:
    """NeMo's connector: its section of config.json, ours, its tensors by NeMo's names, what it makes of an utterance's encoder layers."""

    section: dict[str, Any]
    ours: ProjectorConfig
    tensors: dict[str, Tensor]
    encode: Callable[[list[Tensor]], Tensor]


class Enter(nn.Linear):
    """What takes the place of the subsampling."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


def conformer(transformers: ModuleType) -> Owner:
    """nemo.collections.asr.modules.ConformerEncoder without subsampling: a linear layer, then the layers of any FastConformer."""
    cfg = EncoderConfig(d_model=32, n_layers=2, n_heads=4, ff_expansion=2, conv_kernel=5, xscaling=True)
    theirs = transformers.ParakeetEncoderConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_kernel_size=5, scale_input=True)
    theirs._attn_implementation = "eager"
    layers, enter, leave = transformers.ParakeetEncoder(theirs).eval(), Enter(WIDTH, 32), nn.Linear(32, LLM)
    randomise(layers)
    layers.subsampling = enter
    state, inner = layers.state_dict(), ModelConfig(encoder=cfg)
    tensors = {e.path.replace("encoder.", "modality_adapter."): state[e.blocks[0].name].reshape(e.p.shape)
               for e in entries(PARAKEET.variants[0], inner, ("encoder.layers.",))}
    tensors |= named("modality_adapter.pre_encode", enter) | named("proj", leave)
    section = dict(_target_="nemo.collections.asr.modules.ConformerEncoder", feat_in=WIDTH, feat_out=-1, n_layers=2, d_model=32, n_heads=4,
                   subsampling="dw_striding", subsampling_factor=1, ff_expansion_factor=2, conv_kernel_size=5, dropout=0.1)
    return Owner(section, ProjectorConfig(conformer=cfg), tensors, lambda read: leave(layers(read[-1][None]).last_hidden_state[0]))


def several(transformers: ModuleType) -> Owner:
    """MultiLayerProjectionConnector: the chosen layers in order, then the encoder's output, side by side."""
    projection = nn.Linear(3 * WIDTH, LLM)
    section = dict(_target_="x.MultiLayerProjectionConnector", target_layer_ids=[-1, 0], input_dim=WIDTH, output_dim=LLM)
    return Owner(section, ProjectorConfig(encoder_layers=[0, 1, 1]), named("modality_adapter.proj", projection),
                 lambda read: projection(torch.cat([*read, read[-1]], -1)))


def qformer(transformers: ModuleType) -> Owner:
    """QformerConnector: BertEncoder as a decoder over each layer's frames, prompts of their own, a softmax of learned weights."""
    from transformers.models.bert.modeling_bert import BertEncoder

    config = transformers.BertConfig(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=WIDTH, add_cross_attention=True, is_decoder=True)
    config._attn_implementation = "eager"
    layers, end = BertEncoder(config).eval(), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LLM))
    prompts, scores = [torch.randn(1, 5, WIDTH) for _ in range(2)], torch.randn(5, 2)
    randomise(layers)
    randomise(end)

    def encode(read: list[Tensor]) -> Tensor:
        found = [layers(p, encoder_hidden_states=x[None]).last_hidden_state for p, x in zip(prompts, read, strict=True)]
        together = torch.stack(found, 0).permute(1, 2, 0, 3)
        return end((together * scores.softmax(-1).unsqueeze(-1)).sum(2))[0]

    tensors = {f"modality_adapter.layer_prompts.{i}": p for i, p in enumerate(prompts)} | {"modality_adapter.layer_weights": scores}
    tensors |= named("modality_adapter.qformer", layers) | named("modality_adapter.proj", end)
    section = dict(_target_="x.QformerConnector", prompt_size=5, target_layer_ids=[0, 1], include_final_output=False,
                   qformer_num_hidden_layers=2,
                   encoder_config=dict(d_model=WIDTH, encoder_attention_heads=4), llm_config=dict(hidden_size=LLM))
    return Owner(section, ProjectorConfig(encoder_layers=[0, 1], qformer=QFormerConfig(5, 2, 4)), tensors, encode)


def named(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": t.detach().clone() for name, t in module.state_dict().items()}


OWNERS = {function.__name__: function for function in (conformer, several, qformer)}


def written(owner: Owner, folder: Path) -> ModelConfig:
    """A SALM's folder with this connector, random otherwise; what it should be read as."""
    cfg = replace(model("qwen3"), encoder=perception.ENCODER)
    weights = drawn(cfg)
    save(folder, FAMILIES["salm/qwen3"], cfg, lambda path, _: weights[path], dtype=torch.float32)
    content = FAMILIES["salm/qwen3"].write(cfg)["perception"] | {**CONFIG, "modality_adapter": owner.section}
    (folder / "config.json").write_text(json.dumps({"perception": content, "pretrained_llm": "x"}))
    stored = {name: t for name, t in load_file(folder / "model.safetensors").items() if not name.startswith("perception.proj")}
    if owner.ours.encoder_layers:
        stored = {name.replace("perception.encoder.", "perception.encoder_multilayer.encoder."): t for name, t in stored.items()}
    save_file(stored | {f"perception.{name}": t.contiguous() for name, t in owner.tensors.items()}, folder / "model.safetensors")
    return replace(cfg, projector=owner.ours)


def layers_of(ctx: Context, count: int) -> tuple[Tensor, list[list[Tensor]]]:
    """Random outputs of encoder layers side by side in a row, and each utterance's."""
    x_AD = torch.randn(len(ctx.audio_segments_A), count * WIDTH)
    places = zip(ctx.audio_starts_U.tolist(), ctx.audio_lengths_U.tolist(), strict=True)
    return x_AD, [list(x_AD[start : start + length].split(WIDTH, -1)) for start, length in places if length]


@pytest.mark.parametrize("kind", OWNERS)
def test_a_connector_of_nemo(transformers: ModuleType, kind: str, tmp_path: Path) -> None:
    owner = OWNERS[kind](transformers)
    expected = written(owner, tmp_path)
    loaded = load(tmp_path, single_mesh())
    assert loaded.cfg == expected
    ours = loaded.cfg.projector
    waves = [torch.zeros(int(16000 * sec)) for sec in SECONDS]
    _, ctx = audio_row(waves, perception.ENCODER, gaps=[1, 0, 2], unused=2, tail=3, projector=ours, training=False)
    # of the layers that `several` reads, the last is there twice
    x_AD, alone = layers_of(ctx, len(set(ours.encoder_layers)) or 1)
    row = torch.cat([x_AD, x_AD[:, -WIDTH:]], -1) if kind == "several" else x_AD
    flat = {path: t.to_local().detach().requires_grad_() if hasattr(t, "to_local") else t for path, t in loaded.tensors.items()}
    w = params.map_named(lambda path, _: flat[f"projector.{path}"], speech_lm.model_spec(loaded.cfg)["projector"])
    got, _ = projector.forward(w, row.requires_grad_(), ctx)
    tokens = [5] * len(alone) if ours.qformer.queries else [len(read[0]) for read in alone]
    starts = [5 * u for u in range(len(alone))] if ours.qformer.queries else ctx.audio_starts_U.tolist()
    for u, read in enumerate(alone):
        wanted = owner.encode(read)
        torch.testing.assert_close(got[starts[u] : starts[u] + tokens[u]], wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    assert got.isfinite().all()
    if ours.qformer.queries:  # what no utterance owns has no influence
        (grad,) = torch.autograd.grad(got[: sum(tokens)].square().sum(), [row])
        real = torch.zeros(len(row), dtype=torch.bool)
        for start, length in zip(ctx.audio_starts_U.tolist(), ctx.audio_lengths_U.tolist(), strict=True):
            real[start : start + length] = True
        assert grad[~real].abs().max() == 0
        assert (grad[real].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("kind", OWNERS)
def test_its_export_holds_the_same_tensors(transformers: ModuleType, kind: str, tmp_path: Path) -> None:
    cfg = written(OWNERS[kind](transformers), tmp_path / "in")
    loaded = load(tmp_path / "in", single_mesh())

    def fetch(path: str, p: params.P) -> Tensor:
        return loaded.tensors[path] if p.kind == "buffer" else loaded.tensors[path].full_tensor()

    save(tmp_path / "out", loaded.family, cfg, fetch, dtype=torch.float32)
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert load(tmp_path / "out", single_mesh()).cfg == cfg


@pytest.mark.parametrize("change, words", [
    (dict(target_layer_ids=[0], include_final_output=False), r"target_layer_ids=\[0\] and the encoder 2 layers, of which the last is not"),
    (dict(_target_="x.Other"), "modality_adapter='Other'"), (dict(input_dim=9), "input_dim=9")])
def test_other_connectors_are_refused(transformers: ModuleType, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    owner = several(transformers)
    written(replace(owner, section=owner.section | change), tmp_path)
    with pytest.raises(HubError, match=words):
        load(tmp_path, single_mesh())
