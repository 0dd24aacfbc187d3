"""The cost of padding: utterances of mixed lengths packed into one row against each padded to the longest, encoder and decoder, on a CPU.

Both run the same compiled layers, forward and backward, in turns; a padded batch is a row of equally long utterances. A packed layer
should take as much less time as it has fewer tokens, attention even less.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from configs.schema import CompileConfig, DecoderConfig, EncoderConfig
from model import decoder, fastconformer, params
from model.context import Context
from model.lengths import encoder_frames, slot_frames
from model.params import Tree
from parallel.gather import Reshard
from perf import report
from perf.nemotron import CONFIG
from perf.text_model import TextModel, pack, single_process
from perf.timing import alternate
from training.engine import Engine, Pass

ENCODER = EncoderConfig(mel_bins=128, d_model=512, n_layers=4, n_heads=8, subsampling_channels=256)  # canary-180m-flash's, but 4 layers
UTTERANCES, SECONDS = 16, (1.0, 20.0)
TEXT_MULTIPLE = 128

Step = Callable[[], Any]


def run(rounds: int = 7) -> tuple[dict[str, Any], bool]:
    """Packed over padded, in time and in slots of the rows: of both together and of each alone."""
    generator = torch.Generator().manual_seed(0)
    seconds = torch.empty(UTTERANCES).log_normal_(1.6, 0.7, generator=generator).clamp(*SECONDS)
    samples = (16_000 * seconds).long().tolist()
    tokens = torch.empty(24).log_normal_(5.05, 0.7, generator=generator).clamp(30, 600).long().tolist()
    rows: list[dict[str, Any]] = []
    for name, make, lengths in (("encoder", encoder_step, samples), ("decoder", decoder_step, tokens)):
        (packed, few), (padded, many) = make(lengths), make([max(lengths)] * len(lengths))
        times = alternate({"packed": packed, "padded": padded}, rounds, warm_up=2)  # compilation first
        rows.append({"part": name, "packed slots": few, "padded slots": many, "packed ms": 1e3 * times["packed"],
                     "padded ms": 1e3 * times["padded"], "time ratio": times["packed"] / times["padded"], "token ratio": few / many})
    report.show(f"Forward and backward, fp32, {torch.get_num_threads()} threads", rows)
    worst = max(rows, key=lambda row: row["time ratio"] / row["token ratio"])
    result = {"time_ratio": worst["time ratio"], "token_ratio": worst["token ratio"], "part": worst["part"],
              **{f"{row['part']}_{key.replace(' ', '_')}": row[key] for row in rows for key in ("time ratio", "token ratio")}}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}, True


def encoder_step(samples: Sequence[int]) -> tuple[Step, int]:
    """Forward and backward of subsampling and layers over utterances of so many samples, and the frames of the row."""
    context = audio_context(samples, ENCODER)
    spec = fastconformer.spec(ENCODER)
    engine = Engine(spec, _encoder_units(), single_process(), torch.float32, reshard=Reshard(), compile=CompileConfig())
    weights, buffers = params.split_kinds(spec, params.init(spec, seed=0))
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    frames = len(context.audio_segments_A)
    mel = torch.randn(8 * frames, ENCODER.mel_bins)

    def step() -> None:
        call = Pass(engine, weights | buffers, context)
        x_AD = call(("subsampling",), fastconformer.subsample, mel)
        for i in range(ENCODER.n_layers):
            x_AD, _ = call((f"layers.{i}",), fastconformer.forward, x_AD)
        torch.autograd.grad(x_AD.square().sum(), list(weights.values()))

    return step, frames


def _encoder_units() -> Iterator[tuple[str, ...]]:
    yield ("subsampling",)
    yield from ((f"layers.{i}",) for i in range(ENCODER.n_layers))


def audio_context(samples: Sequence[int], cfg: EncoderConfig) -> Context:
    """Utterances of so many samples one after another, each with the gap that it needs."""
    places = torch.tensor([slot_frames(n) for n in samples])
    lengths = torch.tensor([encoder_frames(n) for n in samples])
    starts = places.cumsum(0) - places
    segments = torch.repeat_interleave(torch.arange(len(samples)), places)
    none = torch.zeros(0, dtype=torch.int64)
    return Context(cfg, DecoderConfig(), none.int(), none.int(), none, starts, torch.tensor(samples), lengths, segments,
                   torch.arange(len(segments)) - starts[segments], utterance_frames=max(slot_frames(max(samples)), 1))


def decoder_step(lengths: Sequence[int]) -> tuple[Step, int]:
    """Forward and backward of the step benchmark's decoder over utterances of so many tokens, and the slots of the row."""
    slots = -(-sum(lengths) // TEXT_MULTIPLE) * TEXT_MULTIPLE
    row = pack([torch.randint(CONFIG.vocab_size, (n,)) for n in lengths], slots, CONFIG, torch.float32)
    model = TextModel(CONFIG, torch.float32, _decoder_weights(), single_process())
    weights = {name: weight.requires_grad_() for name, weight in model.params.items()}

    def step() -> None:
        call = Pass(model.engine, weights | model.buffers, row.context)
        loss: Tensor = call(("head",), decoder.loss, model.hidden(row, call), row.labels_T)
        torch.autograd.grad(loss, list(weights.values()))

    return step, slots


def _decoder_weights() -> Tree:
    return params.init(decoder.spec(CONFIG), seed=0)
