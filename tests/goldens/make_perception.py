"""Golden values of NeMo's speech front end and FastConformer encoder (nemo-toolkit 3.0.0, torch 2.13.0, CPU, fp32, eval mode).

usage: python make_perception.py SPEECH_FOLDER OUT      needs nemo-toolkit[asr], safetensors and soundfile
       python make_perception.py OUT                    counts alone
Writes OUT/perception.safetensors (audio, features, weights, output, gradients) and OUT/perception.json (configuration, lengths, versions).
"""

import json
import sys
from pathlib import Path
from typing import Any

import soundfile
import torch
from torch import Tensor

CLIPS = ["activated.flac", "agent-user.flac", "digits_7.flac", "agent-alreadyon.flac"]
PREPROCESSOR = dict(sample_rate=16000, normalize="per_feature", window_size=0.025, window_stride=0.01, window="hann", features=128,
                    n_fft=512, log=True, frame_splicing=1, dither=0.0, pad_to=0)
ENCODER = dict(feat_in=128, feat_out=-1, n_layers=2, d_model=64, subsampling="dw_striding", subsampling_factor=8,
               subsampling_conv_channels=32, ff_expansion_factor=4, self_attention_model="rel_pos", n_heads=4,
               att_context_size=[-1, -1], xscaling=False, untie_biases=True, pos_emb_max_len=5000, conv_kernel_size=9,
               conv_norm_type="batch_norm", dropout=0.0, dropout_pre_encoder=0.0, dropout_emb=0.0, dropout_att=0.0)
LONGEST = 200_000  # samples that frames are counted of


def encode(speech: str) -> dict[str, Tensor]:
    """One padded batch of the clips through a random encoder, and its gradients for loss = sum(encoded * probe over valid frames)."""
    from nemo.collections.asr.modules import AudioToMelSpectrogramPreprocessor, ConformerEncoder  # type: ignore[import-not-found]

    torch.manual_seed(0)
    waves = [torch.from_numpy(soundfile.read(f"{speech}/audio/{name}", dtype="float32")[0]) for name in CLIPS]
    length = torch.tensor([len(wave) for wave in waves])
    audio = torch.nn.utils.rnn.pad_sequence(waves, batch_first=True)
    preprocessor, encoder = AudioToMelSpectrogramPreprocessor(**PREPROCESSOR).eval(), ConformerEncoder(**ENCODER).eval()
    with torch.no_grad():
        for name, tensor in encoder.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.08 if tensor.ndim > 1 or "bias" in name else 1 + 0.1 * torch.randn_like(tensor))
        for name, tensor in encoder.named_buffers():
            if name.endswith("running_mean"):
                tensor.normal_(0, 0.1)
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
        mel, mel_length = preprocessor(input_signal=audio, length=length)
        encoded, encoded_length = encoder(audio_signal=mel, length=mel_length)
    probe = torch.randn_like(encoded)
    valid = torch.arange(encoded.shape[2]) < encoded_length[:, None, None]
    again, _ = encoder(audio_signal=mel, length=mel_length)
    (again * probe * valid).sum().backward()
    return dict(audio=audio, audio_length=length, mel=mel, mel_length=mel_length, encoded=encoded, encoded_length=encoded_length,
                probe=probe, window=preprocessor.featurizer.window, filterbank=preprocessor.featurizer.fb) \
        | {f"weights.{name}": tensor for name, tensor in encoder.state_dict().items()} \
        | {f"gradients.{name}": tensor.grad for name, tensor in encoder.named_parameters()}


def compact(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Valid frames alone, [frames, ...] one clip after another, and samples as the 16-bit integers that they were in the files.

    To stay small, features of the last clip, the longest, are left out: the output of the encoder depends on them.
    """
    samples, frames, tokens = (tensors[name].tolist() for name in ("audio_length", "mel_length", "encoded_length"))
    audio = torch.cat([row[:n] for row, n in zip(tensors["audio"], samples, strict=True)]) * 32768
    assert torch.equal(audio.round(), audio)
    packed = {"audio": audio.to(torch.int16), "audio_length": tensors["audio_length"], "window": tensors["window"],
              "filterbank": tensors["filterbank"][0],
              "mel": torch.cat([clip[:, :n].T for clip, n in zip(tensors["mel"][:-1], frames[:-1], strict=True)])}
    for name in ("encoded", "probe"):
        packed[name] = torch.cat([clip[:, :n].T for clip, n in zip(tensors[name], tokens, strict=True)])
    kept = {name: tensor for name, tensor in tensors.items() if "." in name and not name.endswith("num_batches_tracked")}
    return {name: tensor.contiguous().clone() for name, tensor in (packed | kept).items()}


def count() -> dict[str, Any]:
    """Valid mel and encoder frames for every number of samples from 1 to LONGEST, as the numbers at which there is one more."""
    from nemo.collections.asr.modules import AudioToMelSpectrogramPreprocessor
    from nemo.collections.asr.parts.submodules.subsampling import calc_length  # type: ignore[import-not-found]

    frames = AudioToMelSpectrogramPreprocessor(**PREPROCESSOR).featurizer.get_seq_len(torch.arange(LONGEST + 1))
    tokens = calc_length(frames.float(), all_paddings=2, kernel_size=3, stride=2, ceil_mode=False, repeat_num=3)
    return {"longest": LONGEST, "mel_frames_rise_at": rises(frames), "encoder_frames_rise_at": rises(tokens)}


def rises(counts: Tensor) -> list[int]:
    """Where a count that starts at 0 becomes one more than before."""
    steps = counts.diff()
    assert counts[0] == 0
    assert set(steps.tolist()) == {0, 1}
    return (steps.nonzero()[:, 0] + 1).tolist()


def main() -> None:
    import nemo  # type: ignore[import-not-found]
    from safetensors.torch import save_file

    out = Path(sys.argv[-1])
    if len(sys.argv) == 2:
        facts = json.loads((out / "perception.json").read_text())
        (out / "perception.json").write_text(json.dumps(facts | count()))
        return
    speech = sys.argv[1]
    tensors = encode(speech)
    save_file(compact(tensors), out / "perception.safetensors")
    facts = dict(clips=CLIPS, preprocessor=PREPROCESSOR, encoder=ENCODER, mel_length=tensors["mel_length"].tolist(),
                 encoded_length=tensors["encoded_length"].tolist(), nemo=nemo.__version__, torch=torch.__version__) | count()
    (out / "perception.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
