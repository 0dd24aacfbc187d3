"""Values that are wrong by themselves."""

from collections.abc import Iterable, Iterator

from configs.schema import Config
from model.mel import SAMPLE_RATE
from parallel.names import kept_share
from parallel.rules import Environment, rule, value

CHOICES = {
    "precision": ("bf16", "fp32", "fp64"),
    "compile.scope": ("layer", "step"),
    "data.kind": ("manifest", "text", "digits"),
    "data.channels": ("mean", "first", "error"),
    "data.on_bad_audio": ("fail", "skip"),
    "data.on_bad_text": ("fail", "skip"),
    "data.on_too_long": ("fail", "skip"),
    "model.encoder.kind": ("fastconformer", "whisper", "whisper_30s", "glm_asr", "glm_asr_30s"),
    "parallel.cp_attention": ("auto", "gather", "ring"),
    "parallel.cp_split": ("row", "document"),
    "parallel.ep_dispatch": ("allgather", "alltoall", "deepep"),
    "parallel.reduce_dtype": ("fp32", "bf16"),
    "optimizer.master_dtype": ("fp32", "bf16"),
    "optimizer.moment_dtype": ("fp32", "bf16"),
    "model.encoder.conv_norm": ("batch_norm", "layer_norm"),
    "model.decoder.activation": ("relu2", "swiglu"),
    "model.decoder.router": ("sigmoid", "softmax"),
    "model.decoder.rope_scaling.kind": ("none", "linear", "llama3", "yarn", "dynamic", "longrope"),
}
AT_LEAST_ONE = (
    "parallel.dp_replicate", "parallel.pp", "parallel.pp_chunks", "parallel.cp", "parallel.tp", "parallel.ep",
    "train.steps", "train.accumulate", "train.log_every", "train.keep_checkpoints", "generation.max_new_tokens",
    "data.timeout_sec", "data.multiple",
    "model.encoder.mel_bins", "model.encoder.d_model", "model.encoder.n_heads", "model.encoder.ff_expansion", "model.encoder.conv_kernel",
    "model.encoder.max_positions",
    "model.encoder.subsampling_channels", "model.decoder.d_model", "model.decoder.vocab_size", "model.decoder.n_heads",
    "model.decoder.n_kv_heads", "model.decoder.head_dim", "model.decoder.mamba_heads", "model.decoder.mamba_head_dim",
    "model.decoder.mamba_groups", "model.decoder.mamba_state", "model.decoder.mamba_conv", "model.decoder.mamba_chunk",
    "model.decoder.n_experts", "model.decoder.top_k", "model.decoder.moe_ffn", "model.decoder.n_group", "model.decoder.topk_group",
    "model.decoder.window", "model.decoder.vocab_multiple", "model.decoder.rope_scaling.factor",
    "model.decoder.rope_scaling.trained_positions",
)
NOT_NEGATIVE = (
    "data.workers", "data.max_skipped", "data.curriculum_steps", "train.ctc_weight", "train.validate_every", "train.decode_every",
    "train.checkpoint_every", "optimizer.lr", "optimizer.min_lr", "optimizer.warmup_steps", "optimizer.weight_decay", "optimizer.clip_norm",
    "model.lora.rank", "model.lora.alpha", "model.lora.dropout", "generation.temperature",
    "model.encoder.n_layers", "model.projector.hidden", "model.decoder.mlp_ffn", "model.decoder.shared_ffn", "model.decoder.moe_latent",
    "model.decoder.bias_update_rate", "model.decoder.aux_loss_coeff",
)


def present(cfg: Config, keys: Iterable[str]) -> list[str]:
    """The keys without those of an encoder that the model does not have."""
    return [key for key in keys if cfg.model.encoder is not None or not key.startswith("model.encoder.")]


@rule({"precision": "fp16"},
      {"compile.scope": "graph"})
def choices(cfg: Config, environment: Environment) -> Iterator[str]:
    for key in present(cfg, CHOICES):
        if key == "precision" and str(cfg.precision).startswith(("fp16", "16")):
            yield f"precision={cfg.precision} needs a loss scaler, which is not here; choose bf16, which needs none and is as fast"
        elif value(cfg, key) not in CHOICES[key]:
            yield f"{key}={value(cfg, key)} is unknown; choose one of {', '.join(CHOICES[key])}"


@rule({"train.activation_checkpointing": "some"},
      {"train.activation_checkpointing": "1.5"},
      {"train.activation_checkpointing_encoder": "0.5", "compile.enabled": False})
def recomputation(cfg: Config, environment: Environment) -> Iterator[str]:
    for key in ("train.activation_checkpointing", "train.activation_checkpointing_encoder"):
        policy = str(value(cfg, key))
        share = kept_share(policy)
        if policy in ("none", "selective", "full"):
            continue
        if share is None or not 0 < share < 1:
            yield f"{key}={policy} is unknown; choose none, selective, full, or a number between 0 and 1"
        elif not cfg.compile.enabled or cfg.compile.scope != "layer":
            yield f"{key}={policy} is a share that compiled layers keep; choose compile.enabled=true with compile.scope=layer, or selective"


@rule({"train.accumulate": 0})
def ranges(cfg: Config, environment: Environment) -> Iterator[str]:
    for keys, least in ((AT_LEAST_ONE, 1), (NOT_NEGATIVE, 0)):
        for key in present(cfg, keys):
            number = value(cfg, key)
            if not isinstance(number, (int, float)) or not number >= least:  # nan is not
                yield f"{key}={number} is too small; it must be at least {least}"


@rule({"data.sample_rate": 8000},
      {"optimizer.betas": (0.9, 1.0)},
      {"optimizer.eps": 0.0},
      {"model.decoder.time_step_min": 0.2})
def limits(cfg: Config, environment: Environment) -> Iterator[str]:
    decoder = cfg.model.decoder
    if cfg.data.sample_rate != SAMPLE_RATE and cfg.model.encoder is not None:
        yield (f"data.sample_rate={cfg.data.sample_rate} is not the {SAMPLE_RATE} Hz of the features; leave it at {SAMPLE_RATE}, "
               "other rates are resampled")
    if not all(0 <= beta < 1 for beta in cfg.optimizer.betas):
        yield f"optimizer.betas={list(cfg.optimizer.betas)} must be at least 0 and less than 1; the default is [0.9, 0.98]"
    if not cfg.optimizer.eps > 0:
        yield f"optimizer.eps={cfg.optimizer.eps} must be above 0, since moments of 0 are divided by it; the default is 1e-8"
    if not 0 <= decoder.time_step_min <= decoder.time_step_max:
        yield (f"model.decoder.time_step_min={decoder.time_step_min} must be at least 0 and at most "
               f"model.decoder.time_step_max={decoder.time_step_max}; the defaults are 0.001 and 0.1")
