"""What the matrix of layouts compares: the cells, the small model that all of them train, and the rows that it sees."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from configs.schema import Config
from data.packing import AUDIO, Example, pack_row
from parallel.mesh import sizes
from training import config
from training.step import Batch

ROWS = {  # kind -> size of a row
    "mixed": "{tokens: 96, audio_frames: 48, utterances: 6, utterance_frames: 16, label_tokens: 12}",
    "lengths": "{tokens: 768, audio_frames: 48, utterances: 8, utterance_frames: 16, label_tokens: 700}",
}
JOINED = "{tokens: 384, audio_frames: 192, utterances: 24, utterance_frames: 16, label_tokens: 12}"  # four "mixed" ones
SHORT_AND_LONG = (1, 2, 3, 5, 7, 8, 9, 698)  # tokens of the utterances of a "lengths" row
MODEL = (  # a width of 25: shards are uneven, and of 8 one is empty
    "+experiment=digits", "compile.enabled=false", "train.steps=10", "train.ctc_weight=0.3", "optimizer.warmup_steps=2", "optimizer.eps=1e-6",
    "model.encoder.d_model=16", "model.encoder.n_layers=1", "model.encoder.n_heads=4", "model.encoder.subsampling_channels=4",
    "model.encoder.conv_norm=layer_norm",
    "model.decoder.pattern=M*E-", "model.decoder.d_model=25", "model.decoder.vocab_size=50", "model.decoder.n_heads=4",
    "model.decoder.n_kv_heads=2", "model.decoder.head_dim=8", "model.decoder.rope_theta=10000.0", "model.decoder.mamba_heads=8",
    "model.decoder.mamba_head_dim=4", "model.decoder.mamba_groups=4", "model.decoder.mamba_state=8", "model.decoder.mamba_chunk=16",
    "model.decoder.mlp_ffn=32", "model.decoder.n_experts=8", "model.decoder.top_k=2", "model.decoder.moe_ffn=12",
    "model.decoder.shared_ffn=20", "model.decoder.bias_update_rate=0.01",
)

CHECKPOINTED = ("train.activation_checkpointing=full", "train.activation_checkpointing_encoder=full")
SELECTIVE = ("train.activation_checkpointing=selective", "train.activation_checkpointing_encoder=selective")

VARIANT = (
    "model.decoder.activation=swiglu", "model.decoder.tie_embeddings=true", "model.decoder.attention_bias=true", "model.decoder.qk_norm=true",
    "model.decoder.mlp_bias=true", "model.decoder.mamba_bias=true", "model.decoder.post_norm=true", "model.decoder.mamba_groups=1",
    "model.decoder.pattern=MWE-", "model.decoder.window=5", "model.encoder.conv_norm=batch_norm",
    "model.encoder.bias=false",  # of a bias before a batch norm the true gradient is 0
    "model.projector.conformer={d_model: 8, n_layers: 1, n_heads: 2, conv_kernel: 3, bias: false}",
)
SYNCED = ("model.encoder.conv_norm=batch_norm", "model.encoder.bias=false", "model.encoder.sync_batch_norm=true",
          "model.projector.conformer={d_model: 8, n_layers: 1, n_heads: 2, conv_kernel: 3, bias: false, sync_batch_norm: true}")
BALANCED = ("model.decoder.aux_loss_coeff=0.2", "model.decoder.pattern=ME*E-")
ADAPTERS = ("model.lora.rank=3", "model.lora.dora=true", "model.lora.dropout=0.2", "model.decoder.moe_latent=12",
            r"model.lora.targets=['encoder\.','projector','decoder\.layers\.[013]\.','decoder\.layers\.2\.(shared|latent)']")
GLM_ASR = ("model.encoder.kind=glm_asr", "train.ctc_weight=0", "model.projector.hidden=20")
DOCUMENT = {"cp": 2, "cp_split": "document"}
QUERIES = ("train.ctc_weight=0", "model.encoder.n_layers=2", "model.projector.encoder_layers=[0,1]",
           "model.projector.qformer={queries: 3, n_layers: 1, n_heads: 2, ffn: 12}")


@dataclass(frozen=True)
class Cell:
    """One layout over `world` processes that must give what one process gives."""

    name: str
    world: int
    parallel: dict[str, object] = field(default_factory=dict)  # parallel.<key>
    rows: int = 4  # of the global batch; each rank, or group of cp tp ranks, takes its part one after the other
    kind: str = "mixed"  # of rows, a key of ROWS
    model: tuple[str, ...] = ()  # further overrides, which the single process gets too
    starved: bool = False  # no token chooses the second half of the experts
    compiled: str = ""  # compile.scope, or nothing for eager
    quick: bool = False  # whether it is one of those that run in `make test`
    own: tuple[str, ...] = ()  # overrides of this cell alone
    joined: bool = False  # the single process has all utterances in one row: for losses that are no sum over rows

    @property
    def reference(self) -> "Cell":
        """The run of one process that it must equal."""
        name = f"{self.rows} {self.kind} {' '.join(self.model)} {self.starved} {self.joined}"
        return Cell(name, 1, {}, self.rows, self.kind, self.model, self.starved, joined=self.joined)

    def config(self, precision: str) -> Config:
        """The whole configuration, with the accumulation that brings all rows into one step."""
        own = [f"parallel.{key}={value}" for key, value in self.parallel.items()]
        compiled = ["compile.enabled=true", f"compile.scope={self.compiled}"] if self.compiled else []
        sizes_of_rows = f"{ROWS[self.kind]},{JOINED}" if self.joined else ROWS[self.kind]
        cfg, _ = config.load([*MODEL, f"data.rows=[{sizes_of_rows}]", f"precision={precision}", *compiled, *self.model, *self.own, *own])
        cfg.train.accumulate = 1 if self.joined else self.rows // sizes(cfg.parallel, self.world).dp
        return cfg


def cells() -> list[Cell]:
    """The whole matrix."""
    return [
        Cell("zero 0", 2, {"zero_stage": 0}),
        Cell("zero 1", 2, {"zero_stage": 1}),
        Cell("zero 2", 2, {"zero_stage": 2}),
        Cell("zero 3", 2, {"defer_grad_sync": False}),
        Cell("zero 3, no accumulation", 2, rows=2),
        Cell("ep 2", 2, {"ep": 2, "defer_grad_sync": False}),
        Cell("ep 2, gradients reduced once", 2, {"ep": 2, "defer_grad_sync": True}),
        Cell("ep 2, experts without a token", 2, {"ep": 2}, starved=True),
        Cell("ep 2, zero 0", 2, {"ep": 2, "zero_stage": 0}),
        Cell("dp 4", 4),
        Cell("dp 4, zero 0", 4, {"zero_stage": 0}, rows=8, quick=True),
        Cell("dp 4, zero 1", 4, {"zero_stage": 1}, rows=8, quick=True),
        Cell("dp 4, zero 2", 4, {"zero_stage": 2, "defer_grad_sync": False}, rows=8, quick=True),
        Cell("dp 4, gradients reduced once", 4, {"defer_grad_sync": True}, rows=8, quick=True),
        Cell("dp 4, weights kept after forward", 4, {"reshard_after_forward": False, "defer_grad_sync": False}, rows=8, quick=True),
        Cell("dp 4, experts' weights kept", 4, {"reshard_experts_after_forward": False, "defer_grad_sync": False}, rows=8, quick=True),
        Cell("zero 2, optimizer on the host", 2, {"zero_stage": 2, "offload": "offload_optimizer"}),
        Cell("ep 2, parameters on the host", 2, {"ep": 2, "offload": "offload_param", "defer_grad_sync": False}),
        Cell("hsdp 2 x 1, tp 2, ep 2, parameters on the host", 4, {"dp_replicate": 2, "tp": 2, "ep": 2, "offload": "parameters"}, quick=True),
        *dispatches(),
        Cell("hsdp 2 x 1", 2, {"dp_replicate": 2}),
        Cell("hsdp 2 x 2", 4, {"dp_replicate": 2}, quick=True),
        Cell("hsdp 2 x 2, zero 2", 4, {"dp_replicate": 2, "zero_stage": 2}, rows=8),
        Cell("hsdp 2 x 2, gradients reduced once", 4, {"dp_replicate": 2, "defer_grad_sync": True}, rows=8),
        Cell("hsdp 2 x 2, ep 2", 4, {"dp_replicate": 2, "ep": 2}),
        Cell("hsdp 2 x 2, ep 4 over both replicas", 4, {"dp_replicate": 2, "ep": 4}, quick=True),
        Cell("hsdp 4 x 1", 4, {"dp_replicate": 4}),
        Cell("tp 2", 2, {"tp": 2}, rows=2),
        Cell("cp 2", 2, {"cp": 2}, rows=2),
        Cell("cp 2, utterances of 1 to 698 tokens", 2, {"cp": 2}, rows=1, kind="lengths"),
        Cell("tp 2, utterances of 1 to 698 tokens", 2, {"tp": 2}, rows=1, kind="lengths"),
        Cell("tp 2, zero 0", 2, {"tp": 2, "zero_stage": 0}, rows=2),
        Cell("cp 2, zero 0", 2, {"cp": 2, "zero_stage": 0}, rows=2),
        Cell("tp 2, ep 2", 2, {"tp": 2, "ep": 2}, rows=2),
        Cell("cp 2, ep 2", 2, {"cp": 2, "ep": 2}, rows=2),
        Cell("tp 4", 4, {"tp": 4}, rows=2),
        Cell("tp 4, 2 Mamba groups", 4, {"tp": 4}, rows=2, model=("model.decoder.mamba_groups=2",)),
        Cell("cp 4", 4, {"cp": 4}, rows=2),
        Cell("cp 4, 2 Mamba groups", 4, {"cp": 4}, rows=2, model=("model.decoder.mamba_groups=2",)),
        Cell("cp 4, utterances of 1 to 698 tokens", 4, {"cp": 4}, rows=1, kind="lengths"),
        Cell("cp 2, each document cut", 2, DOCUMENT, rows=2, model=("data.multiple=4",)),
        Cell("cp 2, each document cut, utterances of 1 to 698 tokens", 2, DOCUMENT, rows=1, kind="lengths", model=("data.multiple=4",)),
        Cell("cp 2, tp 2, ep 4, each document cut", 4, DOCUMENT | {"tp": 2, "ep": 4}, rows=2, model=("data.multiple=4",), quick=True),
        *rings(),
        Cell("dp 2, tp 2", 4, {"tp": 2}, rows=2),
        Cell("dp 2, cp 2", 4, {"cp": 2}, rows=2),
        Cell("cp 2, tp 2", 4, {"cp": 2, "tp": 2}, rows=2, quick=True),
        Cell("cp 2, tp 2, swiglu, tied, biases, norms of heads and batches, 1 Mamba group", 4, {"cp": 2, "tp": 2}, rows=2, model=VARIANT, quick=True),
        Cell("cp 2, tp 2, adapters with row lengths and dropout", 4, {"cp": 2, "tp": 2}, rows=2, model=ADAPTERS),
        Cell("dp 2, tp 2, queries that read two encoder layers", 4, {"tp": 2}, rows=2, model=QUERIES, quick=True),
        Cell("cp 2, GLM-ASR's encoder", 2, {"cp": 2}, rows=2, model=GLM_ASR),
        Cell("pp 2, tp 2, GLM-ASR's encoder", 4, {"pp": 2, "tp": 2}, rows=2, model=GLM_ASR),
        Cell("dp 2, cp 2, ep 4", 4, {"cp": 2, "ep": 4}, rows=4, quick=True),
        Cell("hsdp 2 x 1, tp 2, ep 2", 4, {"dp_replicate": 2, "tp": 2, "ep": 2}, quick=True),
        Cell("ep 2, recomputed", 2, {"ep": 2}, own=CHECKPOINTED),
        Cell("cp 2, tp 2, ep 4, all to all, recomputed", 4, {"cp": 2, "tp": 2, "ep": 4, "ep_dispatch": "alltoall"}, own=CHECKPOINTED, quick=True),
        Cell("cp 2, tp 2, ep 4, recomputed but for exchanges", 4, {"cp": 2, "tp": 2, "ep": 4}, own=SELECTIVE, quick=True),
        Cell("dp 2, cp 2, tp 2", 8, {"cp": 2, "tp": 2}, rows=2),
        Cell("dp 2, cp 2, tp 2, ep 8", 8, {"cp": 2, "tp": 2, "ep": 8}, rows=2),
        Cell("hsdp 2 x 2, tp 2, ep 4, zero 2", 8, {"dp_replicate": 2, "tp": 2, "ep": 4, "zero_stage": 2}),
        Cell("dp 2, cp 2, tp 2, ep 8, all to all", 8, {"cp": 2, "tp": 2, "ep": 8, "ep_dispatch": "alltoall"}, rows=2),
        Cell("cp 8", 8, {"cp": 8, "cp_attention": "gather"}, rows=1),
        Cell("dp 8, ep 2", 8, {"ep": 2}, rows=8),
        Cell("hsdp 2 x 4, ep 2", 8, {"dp_replicate": 2, "ep": 2}, rows=8),
        Cell("hsdp 2 x 4, ep 4, zero 1", 8, {"dp_replicate": 2, "ep": 4, "zero_stage": 1}, rows=8),
        *pipelines(),
        *over_all_rows(),
        *compiled(2, "layer", {"zero 3": {}, "zero 2": {"zero_stage": 2}, "ep 2": {"ep": 2}, "tp 2": {"tp": 2}, "cp 2": {"cp": 2}}),
        *compiled(2, "layer", {"ep 2, all to all": {"ep": 2, "ep_dispatch": "alltoall"}}),
        Cell("cp 2, each document cut, graphs of a layer", 2, DOCUMENT, compiled="layer", model=("data.multiple=4",)),
        *compiled(2, "step", {"zero 3": {}, "zero 0": {"zero_stage": 0}, "ep 2": {"ep": 2}, "tp 2": {"tp": 2}, "cp 2": {"cp": 2}}),
        Cell("ep 2, recomputed, graphs of a layer", 2, {"ep": 2}, own=CHECKPOINTED, compiled="layer"),
        Cell("tp 2, recomputed but for exchanges, graphs of a layer", 2, {"tp": 2}, own=SELECTIVE, compiled="layer"),
        *compiled(2, "layer", {"ep 2, DeepEP": {"ep": 2, "ep_dispatch": "deepep"}}),
        *compiled(2, "step", {"ep 2, all to all": {"ep": 2, "ep_dispatch": "alltoall"}}),
        *compiled(4, "layer", {"hsdp 2 x 2, ep 2": {"dp_replicate": 2, "ep": 2}, "cp 2, tp 2, ep 4": {"cp": 2, "tp": 2, "ep": 4}}),
    ]


def dispatches() -> list[Cell]:
    """Cells whose tokens travel to experts, by each dispatch."""
    return [
        Cell("ep 2, all to all", 2, {"ep": 2, "ep_dispatch": "alltoall"}),
        Cell("ep 2, all to all, experts without a token", 2, {"ep": 2, "ep_dispatch": "alltoall"}, starved=True),
        Cell("ep 4", 4, {"ep": 4}),
        Cell("ep 4, all to all", 4, {"ep": 4, "ep_dispatch": "alltoall"}),
        Cell("dp 4, ep 2, all to all, experts without a token", 4, {"ep": 2, "ep_dispatch": "alltoall"}, starved=True, quick=True),
        Cell("dp 4, ep 2", 4, {"ep": 2}, quick=True),
        Cell("ep 4, DeepEP", 4, {"ep": 4, "ep_dispatch": "deepep"}, quick=True),
        Cell("ep 2, DeepEP, experts without a token", 2, {"ep": 2, "ep_dispatch": "deepep"}, starved=True),
    ]


def pipelines() -> list[Cell]:
    """Cells with stages, whose rows are what travels."""
    looped = {"pp": 2, "pp_schedule": "interleaved_1f1b", "pp_chunks": 2}
    bubble, in_a_v = {"pp": 2, "pp_schedule": "zero_bubble"}, {"pp": 2, "pp_schedule": "zbv", "pp_chunks": 2}
    return [
        Cell("pp 2", 2, {"pp": 2, "defer_grad_sync": False}),
        Cell("pp 2, gradients reduced once", 2, {"pp": 2, "defer_grad_sync": True}),
        Cell("pp 2, zero 0", 2, {"pp": 2, "zero_stage": 0}),
        Cell("pp 2, one row", 2, {"pp": 2}, rows=1),
        Cell("pp 2, gpipe", 2, {"pp": 2, "pp_schedule": "gpipe"}),
        Cell("pp 2, 4 stages interleaved", 2, looped),
        Cell("pp 2, 4 stages breadth first", 2, looped | {"pp_schedule": "looped_bfs"}),
        Cell("pp 2, zero bubble", 2, bubble),
        Cell("pp 2, zero bubble, recomputed", 2, bubble, own=CHECKPOINTED),
        Cell("pp 2, zero bubble, 4 stages, first stage frozen", 2, bubble | {"pp_chunks": 2},
             model=("model.freeze_params=[encoder,projector,ctc,decoder.embedding,'decoder.layers.[0-1]']",)),
        Cell("pp 2, ZBV", 2, in_a_v),
        Cell("pp 2, ZBV, one row, tied", 2, in_a_v, rows=1, model=VARIANT),
        Cell("pp 2, DualPipeV", 2, in_a_v | {"pp_schedule": "dualpipev"}),
        Cell("pp 2, ep 2, DualPipeV, tied", 4, in_a_v | {"pp_schedule": "dualpipev", "ep": 2}, rows=12, model=VARIANT, quick=True),
        Cell("pp 4, zero bubble", 4, {"pp": 4, "pp_schedule": "zero_bubble"}, rows=8),
        Cell("pp 2, cp 2, tp 2, ZBV, gradients reduced once", 8, in_a_v | {"cp": 2, "tp": 2, "defer_grad_sync": True}),
        Cell("pp 2, experts without a token", 2, {"pp": 2}, starved=True),
        Cell("pp 2, swiglu, tied, biases, norms of heads and batches, 1 Mamba group", 2, {"pp": 2}, model=VARIANT),
        Cell("pp 2, first stage frozen", 2, {"pp": 2},
             model=("model.freeze_params=[encoder,projector,ctc,decoder.embedding,'decoder.layers.[0-2]']",)),
        Cell("pp 2, tied, parameters on the host", 2, {"pp": 2, "offload": "parameters"}, model=VARIANT),
        Cell("pp 4", 4, {"pp": 4}),
        Cell("pp 4, tied", 4, {"pp": 4}, model=VARIANT, quick=True),
        Cell("pp 2, dp 2", 4, {"pp": 2}, quick=True),
        Cell("pp 2, dp 2, zero 0", 4, {"pp": 2, "zero_stage": 0}),
        Cell("pp 2, dp 2, zero 1", 4, {"pp": 2, "zero_stage": 1}, rows=8),
        Cell("pp 2, dp 2, zero 2", 4, {"pp": 2, "zero_stage": 2, "defer_grad_sync": False}, rows=8),
        Cell("pp 2, dp 2, gradients reduced once", 4, {"pp": 2, "defer_grad_sync": True}, rows=8),
        Cell("pp 2, hsdp 2 x 1", 4, {"pp": 2, "dp_replicate": 2}),
        Cell("pp 2, ep 2", 4, {"pp": 2, "ep": 2}),
        Cell("pp 2, ep 2, 4 stages interleaved, tied", 4, looped | {"ep": 2}, rows=8, model=VARIANT, quick=True),
        Cell("pp 2, tp 2", 4, {"pp": 2, "tp": 2}),
        Cell("pp 2, cp 2", 4, {"pp": 2, "cp": 2}),
        Cell("pp 2, utterances of 1 to 698 tokens", 2, {"pp": 2}, rows=2, kind="lengths"),
        Cell("pp 2, tp 2, cp 2", 8, {"pp": 2, "tp": 2, "cp": 2}),
        Cell("pp 2, cp 2, ep 2", 8, {"pp": 2, "cp": 2, "ep": 2}),
        Cell("pp 2, cp 2, ep 4, all to all", 8, {"pp": 2, "cp": 2, "ep": 4, "ep_dispatch": "alltoall"}),
        Cell("pp 4, dp 2, ep 2", 8, {"pp": 4, "ep": 2}, rows=8),
        *compiled(2, "layer", {"pp 2": {"pp": 2}, "pp 2, 4 stages interleaved": looped, "pp 2, zero bubble": bubble, "pp 2, ZBV": in_a_v}),
        Cell("pp 2, dp 2, ep 2, zero bubble, recomputed but for exchanges, graphs of a layer", 4, bubble | {"ep": 2}, own=SELECTIVE,
             compiled="layer"),
        *compiled(4, "layer", {"pp 2, ep 2": {"pp": 2, "ep": 2}, "pp 2, tp 2": {"pp": 2, "tp": 2}}),
    ]


def over_all_rows() -> list[Cell]:
    """Cells whose experts are balanced by a loss, or whose batch norms have statistics, over the rows of all ranks, one row a rank."""
    def cell(name: str, world: int, rows: int, keys: dict[str, object], **more: Any) -> Cell:
        return Cell(f"{name}, experts balanced by a loss", world, keys, rows=rows, model=BALANCED, joined=rows > 1, **more)

    def synced(name: str, world: int, rows: int, keys: dict[str, object], **more: Any) -> Cell:
        return Cell(f"{name}, batch norms over all rows", world, keys, rows=rows, model=SYNCED, joined=True, **more)

    return [
        synced("dp 2", 2, 2, {}),
        synced("dp 4, zero 0", 4, 4, {"zero_stage": 0}, quick=True),
        synced("dp 2, tp 2", 4, 2, {"tp": 2}),
        synced("pp 2, dp 2, cp 2, recomputed", 8, 2, {"pp": 2, "cp": 2}, own=CHECKPOINTED),
        synced("dp 2, graphs of a layer", 2, 2, {}, compiled="layer"),
        cell("dp 2", 2, 2, {}),
        cell("ep 2", 2, 2, {"ep": 2}),
        cell("ep 2, all to all", 2, 2, {"ep": 2, "ep_dispatch": "alltoall"}),
        cell("cp 2", 2, 1, {"cp": 2}),
        cell("tp 2", 2, 1, {"tp": 2}),
        cell("pp 2", 2, 1, {"pp": 2}),
        cell("dp 4, zero 0", 4, 4, {"zero_stage": 0}),
        cell("pp 2, dp 2", 4, 2, {"pp": 2}, quick=True),
        cell("dp 2, cp 2, ep 4, recomputed but for exchanges", 4, 2, {"cp": 2, "ep": 4}, own=SELECTIVE, quick=True),
        cell("hsdp 2 x 1, tp 2, ep 2, recomputed", 4, 2, {"dp_replicate": 2, "tp": 2, "ep": 2}, own=CHECKPOINTED),
        cell("pp 2, cp 2, dp 2", 8, 2, {"pp": 2, "cp": 2}),
        cell("dp 2, graphs of a layer", 2, 2, {}, compiled="layer"),
        cell("cp 2, recomputed but for exchanges, graphs of a layer", 2, 1, {"cp": 2}, own=SELECTIVE, compiled="layer"),
        cell("dp 2, graphs of a step", 2, 2, {}, compiled="step"),
    ]


def rings() -> list[Cell]:
    """Cells whose keys and values go round the ranks of cp."""
    ring = {"cp_attention": "ring"}
    return [
        Cell("cp 2, ring", 2, ring | {"cp": 2}, rows=2),
        Cell("cp 4, ring, utterances of 1 to 698 tokens", 4, ring | {"cp": 4}, rows=1, kind="lengths", quick=True),
        Cell("cp 4, ring, each document cut", 4, ring | {"cp": 4, "cp_split": "document"}, rows=2, model=("data.multiple=8",)),
        Cell("cp 2, tp 2, ep 4, ring, each document cut", 4, ring | DOCUMENT | {"tp": 2, "ep": 4}, rows=2, model=("data.multiple=4",), quick=True),
        Cell("cp 2, tp 2, ring, recomputed but for exchanges", 4, ring | {"cp": 2, "tp": 2}, rows=2, own=SELECTIVE),
        Cell("cp 8, ring", 8, ring | {"cp": 8}, rows=1),
        *compiled(2, "layer", {"cp 2, ring": ring | {"cp": 2}}),
        *compiled(2, "step", {"cp 2, ring": ring | {"cp": 2}}),
    ]


def compiled(world: int, scope: str, layouts: dict[str, dict[str, object]]) -> list[Cell]:
    """Cells that run as compiled graphs."""
    return [Cell(f"{name}, graphs of a {scope}", world, keys, rows=4, compiled=scope) for name, keys in layouts.items()]


def batches(cfg: Config, cell: Cell) -> list[Batch]:
    """The rows of the global batch: very different numbers of labels, row 1 without audio, row 2 without anything, and at the end of each
    some padding. A "lengths" row has utterances of 1 to 698 tokens, without audio."""
    return [_packed(cfg, examples, 0) for examples in _utterances(cell)]


def joined_row(cfg: Config, cell: Cell) -> Batch:
    """The same utterances in one row."""
    return _packed(cfg, [example for examples in _utterances(cell) for example in examples], 1)


def _packed(cfg: Config, examples: list[Example], size: int) -> Batch:
    row = pack_row(examples, cfg.data.rows[size], cfg.data.encoder, multiple=cfg.data.multiple, queries=cfg.data.queries)
    return {name: torch.from_numpy(value) for name, value in row.items()}


def _utterances(cell: Cell) -> list[list[Example]]:
    """Those of each row."""
    rows = []
    for number in range(cell.rows):
        rng = np.random.default_rng(number)
        if cell.kind == "lengths":
            examples = [_spoken(rng, 0.0, 0, length) for length in rng.permutation(SHORT_AND_LONG)]
        elif number == 2:
            examples = []
        else:
            seconds = [0.0] * 5 if number == 1 else rng.uniform(0.1, 1.2, size=2 + number % 3)
            examples = [_spoken(rng, sec, int(rng.integers(0, 4)), int(rng.integers(1, 3 + 7 * (number % 2)))) for sec in seconds]
        rows.append(examples)
    return rows


def _spoken(rng: np.random.Generator, seconds: float, prompt: int, answer: int) -> Example:
    """An utterance of noise; `answer` tokens with the end token."""
    text = rng.integers(3, 50, size=prompt + answer).tolist()
    samples = rng.standard_normal(int(16000 * seconds)).astype(np.float32) * 0.1
    return Example(str(rng.integers(1 << 30)), [AUDIO, *text[:prompt]], text[prompt:-1], [1], samples)
