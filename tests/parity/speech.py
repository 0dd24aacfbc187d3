"""Whole speech models on a packed row of log-mel features and tokens, against the owner's class on one utterance at a time."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from configs.schema import DecoderConfig, EncoderConfig
from model import decoder, speech_lm
from model.context import Context
from model.hub.load import Loaded
from model.lengths import COUNTING
from tests.parity import results, text
from tests.parity.owners import VOCAB, randomise
from tests.parity.results import Result, runner

AUDIO_ID = 90
MEL_FRAMES = (80, 56, 8)  # of the utterances; GLM-ASR's own class wants multiples of 8
_TEXT = dict(model_type="llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=512, rms_norm_eps=1e-5, eos_token_id=[2], pad_token_id=0,
             tie_word_embeddings=True)


def make_glm_asr(transformers: ModuleType) -> Any:
    """GlmAsrForConditionalGeneration with random weights."""
    torch.manual_seed(0)
    audio = dict(hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_mel_bins=80)
    config = transformers.GlmAsrConfig(audio_config=audio, text_config=dict(_TEXT), audio_token_id=AUDIO_ID, tie_word_embeddings=True)
    config._attn_implementation = "eager"
    model = transformers.GlmAsrForConditionalGeneration(config)
    randomise(model)
    return model.eval()


def make_whisper(transformers: ModuleType, mel_frames: int) -> Any:
    """WhisperModel with random weights that takes exactly so many frames of features."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=80, d_model=16, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=32, decoder_layers=1,
        decoder_attention_heads=4, decoder_ffn_dim=32, max_source_positions=mel_frames // 2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1)
    config._attn_implementation = "eager"
    model = transformers.WhisperModel(config)
    randomise(model)
    return model.eval()


def features(bins: int = 80) -> list[Tensor]:
    """Random log-mel features [frames, bins] of each utterance."""
    g = torch.Generator().manual_seed(1)
    return [torch.randn(frames, bins, generator=g) for frames in MEL_FRAMES]


def mel_row(mels: list[Tensor], encoder: EncoderConfig, decoder: DecoderConfig, texts: list[Tensor], padding: int = 5
            ) -> tuple[Tensor, dict[str, Tensor], Context]:
    """The flat row of features [8 A, M], the token row where each utterance is its audio and then its text, and their Context.

    Labels are the text tokens; an unused utterance and unused frames and slots follow.
    """
    counting = COUNTING[encoder.kind]
    samples = torch.tensor([160 * len(mel) for mel in mels] + [0])
    places = [counting.slots(int(n)) for n in samples[:-1]]
    starts = torch.tensor([sum(places[:u]) for u in range(len(mels))] + [0])
    tokens = counting.tokens(samples)
    gaps = [torch.full((8 * place - len(mel), mel.shape[1]), 7.0) for mel, place in zip(mels, places, strict=True)]  # must not be seen
    mel_AM = torch.cat([*(part for pair in zip(mels, gaps, strict=True) for part in pair), torch.zeros(16, mels[0].shape[1])])
    sizes = torch.tensor([int(n) + len(words) for n, words in zip(tokens, texts, strict=False)])
    ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0), sizes.sum()[None]])
    ids, frames, labels = [], [], []
    for u, words in enumerate(texts):
        n = int(tokens[u])
        ids += [torch.zeros(n, dtype=torch.int64), words]
        frames += [starts[u] + torch.arange(n), torch.full((len(words),), -1)]
        labels += [torch.full((n - 1,), -100), words, torch.tensor([-100])]
    batch = {"tokens_T": torch.cat([*ids, torch.zeros(padding, dtype=torch.int64)]),
             "frames_T": torch.cat([*frames, torch.full((padding,), -1)]), "labels_T": torch.cat([*labels, torch.full((padding,), -100)])}
    segments = torch.cat([torch.repeat_interleave(torch.arange(len(texts)), sizes), torch.full((padding,), len(texts) + 1)])
    owners = torch.cat([torch.repeat_interleave(torch.arange(len(mels)), torch.tensor(places)), torch.full((2,), len(mels) + 1)])
    positions_T = torch.cat([torch.arange(int(n)) for n in [*sizes, padding]])
    positions_A = torch.cat([torch.arange(n) for n in [*places, 2]])
    audio = (starts, samples, tokens, owners, positions_A, int(tokens.max()))
    return mel_AM, batch, Context(encoder, decoder, ends.int(), segments.int(), positions_T, *audio)


def owner_inputs(mel: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """An utterance as the owner reads it: its text, and its audio as placeholders and features."""
    placeholders = torch.full((COUNTING["glm_asr"].tokens(160 * len(mel)),), AUDIO_ID)
    return {"input_ids": torch.cat([placeholders, ids])[None], "input_features": mel.t()[None],
            "input_features_mask": torch.ones(1, len(mel), dtype=torch.int64)}


def _prompts() -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Each utterance's text, and all of it as the owner reads it."""
    return [(ids, owner_inputs(mel, ids)) for mel, (ids, _) in zip(features(), text.utterances(), strict=True)]


def theirs(model: Any) -> Result:
    """The owner's model; its gradients stay in its parameters."""
    labels = [torch.cat([torch.full((prompt["input_ids"].shape[1] - len(ids),), -100), ids]) for ids, prompt in _prompts()]
    return results.theirs(model, [model(**prompt).logits[0] for _, prompt in _prompts()], labels)


def ours(loaded: Loaded) -> Result:
    """All utterances in one packed row."""
    return _result(loaded, [ids for ids, _ in text.utterances()])


def _result(loaded: Loaded, texts: list[Tensor]) -> Result:
    assert loaded.cfg.encoder is not None
    mel_AM, batch, ctx = mel_row(features()[: len(texts)], loaded.cfg.encoder, loaded.cfg.decoder, texts)
    weights = results.leaves(loaded)
    run, head = runner(loaded, weights, ctx), speech_lm.head_unit(loaded.cfg)
    x_TD = speech_lm.layers(run, speech_lm.embed(run, speech_lm.encode_features(run, mel_AM, ctx, {}), batch, ctx), ctx, {})
    loss = run(head, decoder.loss, x_TD, batch["labels_T"]) / (batch["labels_T"] != -100).sum()
    total = int(ctx.cu_seqlens_U1[-1])
    return results.ours(runner(loaded, weights, ctx)(head, decoder.logits, x_TD, torch.arange(total)), loss, weights)


def generate(model: Any) -> Tensor:
    """The tokens that the owner's model adds to the first utterance."""
    _, prompt = _prompts()[0]
    return model.generate(**prompt, max_new_tokens=text.GENERATED, do_sample=False)[0, prompt["input_ids"].shape[1] :]


def predict(loaded: Loaded, generated: Tensor) -> Tensor:
    """Our best token at each place of the generated text."""
    ids = torch.cat([text.utterances()[0][0], generated])
    return _result(loaded, [ids]).logits[-len(generated) - 1 : -1].argmax(-1)
