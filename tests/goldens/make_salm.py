"""Golden values of NeMo's whole speech model, SALM (nemo-toolkit 3.0.0, CPU, fp32, eval mode), and the way back: an export that it opens.

usage: python make_salm.py make SPEECH_FOLDER OUT    writes OUT/salm, which SALM has saved, and OUT/salm.safetensors
       python make_salm.py open SPEECH_FOLDER FOLDER OUT   opens an export of OUT/salm and compares tensors, logits and generated tokens
Needs nemo-toolkit[asr,speechlm2] and soundfile.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import soundfile
import torch
from torch import Tensor

CLIPS = ["digits_10.flac", "digits_7.flac"]
LLM = dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], vocab_size=256, hidden_size=32, intermediate_size=48,
           num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512, rms_norm_eps=1e-6,
           rope_theta=1e4, tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, pad_token_id=0)
PREPROCESSOR = dict(_target_="nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor", sample_rate=16000, normalize="per_feature",
                    window_size=0.025, window_stride=0.01, window="hann", features=80, n_fft=512, log=True, frame_splicing=1, dither=0.0,
                    pad_to=0)
ENCODER = dict(_target_="nemo.collections.asr.modules.ConformerEncoder", feat_in=80, feat_out=-1, n_layers=1, d_model=32,
               subsampling="dw_striding", subsampling_factor=8, subsampling_conv_channels=8, ff_expansion_factor=4,
               self_attention_model="rel_pos", n_heads=4, att_context_size=[-1, -1], xscaling=False, untie_biases=True,
               pos_emb_max_len=5000, conv_kernel_size=9, conv_norm_type="batch_norm", dropout=0.0, dropout_pre_encoder=0.0, dropout_emb=0.0,
               dropout_att=0.0)
ADAPTER = dict(_target_="nemo.collections.speechlm2.modules.perception.IdentityConnector", d_model=32)
AUDIO, PROMPTS, ANSWERS, NEW = 2, [[7, 2, 9, 11], [30, 2, 8, 99]], [[20, 21, 22, 1], [50, 51, 1]], 12


def build(folder: Path) -> Any:
    """A SALM with random weights: no bias is zero, no norm is one."""
    from nemo.collections.speechlm2.models.salm import SALM  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = SALM(dict(pretrained_llm=str(folder / "llm_backbone"), tokenizer_path=str(folder), pretrained_weights=False,
                      audio_locator_tag="<|audio|>", prompt_format="plain",
                      perception=dict(target="nemo.collections.speechlm2.modules.perception.AudioPerceptionModule", output_dim=32,
                                      preprocessor=PREPROCESSOR, encoder=ENCODER, modality_adapter=ADAPTER)))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.12 if tensor.ndim > 1 or "bias" in name else 1 + 0.1 * torch.randn_like(tensor))
        model.embed_tokens.weight.mul_(6)
        for name, tensor in model.named_buffers():
            if name.endswith("running_mean"):
                tensor.normal_(0, 0.1)
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
    return model.eval()


def audio(speech: str) -> list[Tensor]:
    """Samples of the clips."""
    return [torch.from_numpy(soundfile.read(f"{speech}/audio/{name}", dtype="float32")[0]) for name in CLIPS]


def answers(model: Any, speech: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of each conversation, one after another; their summed loss; generated tokens [clips, NEW]."""
    logits, losses, generated = [], [], []
    for wave, prompt, answer in zip(audio(speech), PROMPTS, ANSWERS, strict=True):
        ids = torch.tensor([prompt + answer])
        one = {"audios": wave[None], "audio_lens": torch.tensor([len(wave)]), "input_ids": ids,
               "loss_mask": torch.arange(ids.shape[1])[None] >= len(prompt)}
        inputs = model.prepare_inputs(one)
        found = model(inputs["input_embeds"], attention_mask=inputs["attention_mask"])["logits"][0]
        logits.append(found)
        losses.append(torch.nn.functional.cross_entropy(found, inputs["target_ids"][0], ignore_index=-100, reduction="sum"))
        tokens = model.generate(torch.tensor([prompt]), wave[None], torch.tensor([len(wave)]), max_new_tokens=NEW, do_sample=False,
                                eos_token_id=-1, pad_token_id=0)
        generated.append(tokens[0, -NEW:])
    return torch.cat(logits), torch.stack(losses).sum(), torch.stack(generated)


def make(speech: str, out: Path) -> None:
    from safetensors.torch import save_file

    folder = out / "salm"
    (folder / "llm_backbone").mkdir(parents=True, exist_ok=True)
    (folder / "llm_backbone" / "config.json").write_text(json.dumps(LLM, indent=1))
    shutil.copy(f"{speech}/tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eos|>"}))
    model = build(folder)
    logits, loss, tokens = answers(model, speech)
    loss.backward()
    grads = {f"gradients.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # a card of the library's
    written = folder / "config.json"
    written.write_text(written.read_text().replace(f"{folder}/", "").replace(str(folder), "."))  # it may be opened elsewhere
    save_file({"logits": logits.detach(), "loss": loss.detach()[None], "tokens": tokens} | grads, out / "salm.safetensors")
    print(len(grads), loss.item(), tokens)


def inside(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the embedding where SALMAutomodel has it."""
    return {name.replace("embed_tokens", "llm.model.embed_tokens") if name.startswith("embed") else name: t for name, t in tensors.items()}


def open_again(speech: str, folder: Path, out: Path) -> None:
    from nemo.collections.speechlm2 import models  # type: ignore[import-not-found]
    from safetensors.torch import load_file

    content = json.loads((folder / "config.json").read_text())
    owner = models.SALMAutomodel if content.get("use_nemo_automodel") else models.SALM
    model, golden = owner.from_pretrained(str(folder)).eval(), load_file(out / "salm.safetensors")
    before, after = inside(load_file(out / "salm" / "model.safetensors")), inside(model.state_dict())
    different = [name for name, t in before.items() if not name.endswith("num_batches_tracked") and not torch.equal(t, after[name])]
    with torch.no_grad():
        logits, _, tokens = answers(model, speech)
    print(json.dumps({"owner": owner.__name__, "tensors": len(before), "different": different,
                      "logit_error": ((logits - golden["logits"]).abs().max() / golden["logits"].abs().max()).item(),
                      "same_tokens": torch.equal(tokens, golden["tokens"])}))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2], Path(sys.argv[3]))
    else:
        open_again(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
