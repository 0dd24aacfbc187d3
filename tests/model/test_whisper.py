"""Whisper's and GLM-ASR's encoder on a packed row: the owner's features and layers, utterances apart, compiled as eager, counts."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import Config, DecoderConfig, EncoderConfig, ProjectorConfig, RowSize
from data.packing import AUDIO, Example, pack_row
from model import decoder, lengths, params, projector, speech_lm, whisper, whisper_mel
from model.hub.load import load
from tests.model.rows import audio_row
from tests.parity import speech
from tests.parity.results import leaves, runner, single_mesh
from training.step import make_context

TINY = EncoderConfig(kind="whisper", mel_bins=80, d_model=16, n_layers=2, n_heads=4, max_positions=300)
GLM = EncoderConfig(kind="glm_asr", mel_bins=80, d_model=16, n_layers=2, n_heads=4)


def weights(cfg: EncoderConfig, dtype: torch.dtype = torch.float64) -> Any:
    g = torch.Generator().manual_seed(0)
    return params.map_named(lambda path, p: (torch.randn(p.shape, generator=g) * 0.3 + path.endswith("norm.weight")).to(dtype),
                            whisper.spec(cfg))


def encode(w: Any, mel_AM: Tensor, ctx: Any) -> Tensor:
    x_AD = whisper.subsample(w["subsampling"], mel_AM, ctx)
    for layer in w["layers"]:
        x_AD, stats = whisper.forward(layer, x_AD, ctx)
        assert stats == {}
    return whisper.norm(w["norm"], x_AD)


@pytest.mark.parity
def test_features_are_those_of_whisper(transformers):
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    waves = [torch.randn(n) * 0.1 for n in (16000, 1, 150, 160, 161, 5123, 48001)]
    waves[0][:8000] = 0  # silence is 8 decades below the loudest bin, not below its own
    waves[5][-30:] *= 500  # the loudest frame is the one behind the last
    encoder = EncoderConfig(kind="glm_asr", mel_bins=128)
    audio_S, ctx = audio_row(waves, encoder, unused=2, tail=3)
    got = whisper_mel.log_mel(audio_S, ctx)
    assert got.shape == (len(audio_S) // 160, 128)
    used = torch.zeros(len(got), dtype=torch.bool)
    for start, wave in zip(ctx.audio_starts_U.tolist(), waves, strict=False):
        expected = torch.from_numpy(extractor(wave.numpy(), sampling_rate=16000)["input_features"][0]).t()
        frames = -(-len(wave) // 160)
        torch.testing.assert_close(got[8 * start : 8 * start + frames], expected[:frames], rtol=0, atol=2e-5)
        used[8 * start : 8 * start + frames] = True
    assert not got[~used].any()


@pytest.mark.parity
def test_encoder_and_gradients_are_those_of_whisper(transformers, tmp_path):
    mels, grads = speech.features(), []
    for u, mel in enumerate(mels):  # their class takes one length
        model = speech.make_whisper(transformers, len(mel))
        model.save_pretrained(tmp_path / str(u))
        expected = model.encoder(mel.t()[None]).last_hidden_state[0]
        probe = torch.randn(expected.shape)
        (expected * probe).sum().backward()
        grads.append({name: p.grad for name, p in model.encoder.named_parameters() if p.grad is not None})
        loaded = load(tmp_path / str(u), single_mesh())
        assert loaded.cfg.encoder is not None
        assert loaded.notes[0].endswith("the language model takes the place of Whisper's decoder")
        flat = leaves(loaded)
        w = params.map_named(lambda path, _, flat=flat: flat[f"encoder.{path}"], whisper.spec(loaded.cfg.encoder))
        row, _, ctx = speech.mel_row([mel, mels[2]], loaded.cfg.encoder, DecoderConfig(), [torch.arange(3), torch.arange(4)])
        got = encode(w, row, ctx)[: len(expected)]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        trained = {name: t for name, t in flat.items() if t.requires_grad}
        ours = dict(zip(trained, torch.autograd.grad((got * probe).sum(), list(trained.values())), strict=True))
        for name, theirs in (("subsampling.conv1.weight", "conv1.weight"), ("subsampling.conv2.bias", "conv2.bias"),
                             ("layers.0.q.bias", "layers.0.self_attn.q_proj.bias"), ("layers.1.up.weight", "layers.1.fc1.weight"),
                             ("layers.0.k.weight", "layers.0.self_attn.k_proj.weight"), ("norm.weight", "layer_norm.weight")):
            error = (ours[f"encoder.{name}"] - grads[u][theirs]).norm() / grads[u][theirs].norm()
            assert error < 1e-4, name


@pytest.mark.parametrize("cfg", [TINY, GLM], ids=lambda cfg: cfg.kind)
def test_packed_utterances_are_separate_ones(cfg):
    waves = [torch.randn(n) for n in (4000, 1280 * 5, 163)]
    w = weights(cfg)
    mels = [whisper_mel.log_mel(*audio_row([wave], cfg)) for wave in waves]
    _, ctx = audio_row(waves, cfg, gaps=[0, 2, 1], unused=1, tail=2, dtype=torch.float64)
    noise = torch.randn(8 * len(ctx.audio_segments_A), cfg.mel_bins)
    for start, wave, mel in zip(ctx.audio_starts_U.tolist(), waves, mels, strict=False):
        noise[8 * start : 8 * start + -(-len(wave) // 160)] = mel[: -(-len(wave) // 160)]  # what is between utterances must not matter
    packed = encode(w, noise, ctx)
    for start, wave, mel in zip(ctx.audio_starts_U.tolist(), waves, mels, strict=False):
        alone = encode(w, mel, audio_row([wave], cfg, dtype=torch.float64)[1])
        frames = lengths.halved(-(-len(wave) // 160))
        torch.testing.assert_close(packed[4 * start : 4 * start + frames], alone[:frames], rtol=1e-12, atol=1e-12)


def test_positions_are_whispers_sinusoids(transformers):
    from transformers.models.whisper.modeling_whisper import sinusoids

    table = whisper.subsampling_spec(TINY)["positions"]["weight"]
    torch.testing.assert_close(params.draw("x", table, 0), sinusoids(300, 16), rtol=0, atol=1e-6)
    assert "positions" not in whisper.subsampling_spec(GLM)


def test_frames_are_merged_in_order():
    w = params.map_named(lambda _, p: torch.randn(p.shape), {"projector": projector.spec(ProjectorConfig(hidden=6), GLM, 5)})
    w["norm"] = {"weight": torch.ones(16), "bias": torch.zeros(16)}
    x = torch.randn(8, 16)
    got, _ = projector.forward(w, x, audio_row([torch.zeros(1600)], GLM)[1])
    h = F.layer_norm(x, (16,))
    for token in range(2):
        merged = torch.cat([h[4 * token + i] for i in range(4)])
        inner = F.gelu(w["projector"]["up"]["weight"] @ merged + w["projector"]["up"]["bias"])
        torch.testing.assert_close(got[token], w["projector"]["down"]["weight"] @ inner + w["projector"]["down"]["bias"])


@pytest.mark.parametrize("samples", [0, 1, 159, 160, 161, 320, 960, 961, 1120, 1121, 1279, 1280, 1281, 12800, 160000])
def test_counts(samples):
    counting = lengths.COUNTING["glm_asr"]
    mel = -(-samples // 160)
    frames = (mel + 2 - 3) // 2 + 1 if mel else 0  # padding 1, kernel 3, stride 2
    assert lengths.halved(lengths.whisper_mel_frames(samples)) == frames
    assert counting.tokens(samples) == ((frames - 4) // 4 + 1 if frames >= 4 else 0)
    assert 8 * counting.slots(samples) >= mel + 2 > 8 * (counting.slots(samples) - 1)


def test_one_graph_equals_eager():
    waves = [torch.randn(n) for n in (2500, 1300)]
    audio_S, ctx = audio_row(waves, GLM, unused=1)
    w = weights(GLM, torch.float32)

    def run(compiled: Any) -> Tensor:
        mel_AM = compiled(whisper_mel.log_mel)(audio_S, ctx)
        x_AD = compiled(whisper.subsample)(w["subsampling"], mel_AM, ctx)
        return compiled(whisper.forward)(w["layers"][0], x_AD, ctx)[0]

    got = run(lambda f: torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=False))
    real = whisper._places(ctx)[1][:, :2].t()
    for (start, end), expected in zip(real.tolist(), [run(lambda f: f)] * 2, strict=True):
        torch.testing.assert_close(got[start:end], expected[start:end], rtol=1e-4, atol=1e-4)


@pytest.mark.parity
def test_glm_asr_from_samples_is_the_owners_with_its_30_seconds_of_silence(transformers, tmp_path):
    """Their feature extractor, encoder and language model on one utterance at a time, ours on one packed row of samples."""
    model, extractor = speech.make_glm_asr(transformers), transformers.WhisperFeatureExtractor(feature_size=80)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, single_mesh())
    assert loaded.cfg.encoder is not None
    loaded.cfg.encoder.kind = "glm_asr_30s"
    waves, text = [torch.randn(n) * 0.1 for n in (16123, 40000, 700)], torch.tensor([5, 6, 7, 8])
    row = RowSize(tokens=80, audio_frames=3 * 376, utterances=4, utterance_frames=40, label_tokens=8)
    examples = [Example(str(u), [AUDIO], text.tolist(), [], wave.numpy()) for u, wave in enumerate(waves)]
    batch = {name: torch.from_numpy(t) for name, t in pack_row(examples, row, "glm_asr_30s").items()}
    cfg = Config(model=loaded.cfg, precision="fp32")
    cfg.data.rows, cfg.train.ctc_weight = [row], 0
    ctx = make_context(cfg, batch, single_mesh(), training=False)
    run = runner(loaded, leaves(loaded), ctx)
    x_TD = speech_lm.embed(run, speech_lm.encode(run, batch, ctx, {}), batch, ctx)
    x_TD = speech_lm.layers(run, x_TD, ctx, {})
    got = runner(loaded, leaves(loaded), ctx)(speech_lm.head_unit(loaded.cfg), decoder.logits, x_TD, torch.arange(80))
    for u, wave in enumerate(waves):
        made = extractor(wave.numpy(), sampling_rate=16000, return_attention_mask=True, return_tensors="pt")
        audio = int(ctx.audio_lengths_U[u])
        ids = torch.cat([torch.full((audio,), speech.AUDIO_ID), text])[None]
        expected = model(input_ids=ids, input_features=made["input_features"], input_features_mask=made["attention_mask"]).logits[0]
        start, end = ctx.cu_seqlens_U1[u : u + 2].tolist()
        assert end - start == audio + 4
        torch.testing.assert_close(got[start:end], expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
