"""FastConformer against transformers' parakeet: loaded from its folder, packed, with every gradient; exported, it opens there again."""

from dataclasses import replace

import pytest
import torch

from configs.schema import DecoderConfig
from model import speech_lm
from model.hub.family import entries
from model.hub.load import load
from model.hub.save import foreign, save
from tests.dist.first import gradient_error
from tests.parity import speech
from tests.parity.owners import randomise
from tests.parity.results import leaves, runner, single_mesh

pytestmark = pytest.mark.parity
FRAMES = (131, 64, 17)  # of features


def parakeet(transformers, bias: bool, scale: bool):
    torch.manual_seed(0)
    encoder = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_mel_bins=80, conv_kernel_size=5,
                   subsampling_conv_channels=8, attention_bias=bias, convolution_bias=bias, scale_input=scale)
    config = transformers.ParakeetCTCConfig(vocab_size=20, pad_token_id=19, encoder_config=encoder)
    config._attn_implementation = config.encoder_config._attn_implementation = "eager"
    model = transformers.ParakeetForCTC(config)
    randomise(model)
    return model.eval()


@pytest.mark.parametrize("bias, scale", [(True, False), (False, True)])
def test_encoder(transformers, bias, scale, tmp_path):
    model = parakeet(transformers, bias, scale)
    model.save_pretrained(tmp_path / "in")
    loaded = load(tmp_path / "in", single_mesh())
    assert {note.rpartition(": ")[2] for note in loaded.notes} == {
        "the momentum of the running statistics is a constant", "only the encoder of a recogniser is taken"}
    assert loaded.cfg.encoder is not None
    mels = [torch.randn(n, 80) for n in FRAMES]
    running = replace(loaded.cfg.encoder, freeze_batch_norm=True)  # as theirs in eval mode
    row, _, ctx = speech.mel_row(mels, running, DecoderConfig(), [torch.arange(2)] * 3)
    weights, got, expected = leaves(loaded), [], []
    behind = {"projector.weight": torch.zeros(2688, 32), "projector.bias": torch.zeros(2688)}  # which the last layer looks ahead to
    encoded = speech_lm.encode_features(runner(loaded, weights | behind, ctx), row, ctx, {})
    for u, mel in enumerate(mels):
        start, length = int(ctx.audio_starts_U[u]), int(ctx.audio_lengths_U[u])
        expected.append(model.encoder(mel[None], attention_mask=torch.ones(1, len(mel), dtype=torch.int64)).last_hidden_state[0])
        got.append(encoded[start : start + length])
        torch.testing.assert_close(got[u], expected[u], rtol=0, atol=1e-5 * float(expected[u].abs().max()))
    probe = torch.randn(sum(len(part) for part in got), 32)
    (torch.cat(expected) * probe).sum().backward()
    trained = {name: w for name, w in weights.items() if w.requires_grad}
    grads = dict(zip(trained, torch.autograd.grad((torch.cat(got) * probe).sum(), list(trained.values())), strict=True))
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    ours = {b.name: foreign(grads[e.path], b) for e in entries(loaded.family.variants[0], loaded.cfg, ("encoder.",)) if e.path in grads
            for b in e.blocks}
    assert gradient_error(ours, {name: theirs[name] for name in ours}) < 1e-4

    def fetch(path, p):
        return loaded.tensors[path] if p.kind == "buffer" else loaded.tensors[path].full_tensor()

    save(tmp_path / "out", loaded.family, loaded.cfg, fetch, dtype=torch.float32)
    again = load(tmp_path / "out", single_mesh())
    assert again.family.name == "Parakeet encoder"
    assert again.cfg == loaded.cfg
    opened = transformers.ParakeetEncoder.from_pretrained(tmp_path / "out")
    state = opened.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in model.encoder.state_dict().items() if not name.endswith("tracked"))
