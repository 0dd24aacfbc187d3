"""Every configuration key: its type, its default and one comment. The YAML files beside this one only choose values.

The dataclasses are Hydra structured configs, so an unknown key or a wrong type fails while the configuration is composed.
"""

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class EncoderConfig:
    """Speech encoder over log-mel features: NeMo's FastConformer, Whisper's, or GLM-ASR's (Whisper with rotary positions), any size."""

    kind: str = "fastconformer"  # fastconformer (keys with F are its own) | whisper | glm_asr; whisper_30s | glm_asr_30s: padded to 30 s
    mel_bins: int = 128  # features a frame of 10 ms
    d_model: int = 1024  # width
    n_layers: int = 32  # Conformer layers
    n_heads: int = 8  # attention heads; d_model must be a multiple
    ff_expansion: int = 4  # feed-forward width / d_model
    max_positions: int = 1500  # whisper: frames of 20 ms that have a position
    conv_kernel: int = 9  # F: taps of the depthwise convolution, odd
    conv_norm: str = "batch_norm"  # F: batch_norm (masked, running statistics) | layer_norm
    freeze_batch_norm: bool = False  # F: use the running statistics and do not update them
    sync_batch_norm: bool = False  # F: in training, statistics of the rows of all ranks instead of those of each row
    subsampling_channels: int = 256  # F: channels of the three stride-2 convolutions
    bias: bool = True  # F: biases in linear and convolution layers
    xscaling: bool = False  # F: multiply the subsampled frames by sqrt(d_model)


@dataclass
class QFormerConfig:
    """Learned queries that read the encoder's layers; an utterance becomes so many audio tokens."""

    queries: int = 0  # audio tokens of an utterance, whatever its length; 0: no queries, frames are
    n_layers: int = 2  # each with attention among the queries, attention to the frames, and a feed-forward layer
    n_heads: int = 8  # attention heads; the width is the encoder's
    ffn: int = 3072  # feed-forward width


@dataclass
class ProjectorConfig:
    """From encoder frames, four side by side where they last 20 ms, to the width of the language model. All but `hidden` needs a
    fastconformer."""

    hidden: int = 0  # width between two linear layers with a GELU; 0: one linear layer
    encoder_layers: list[int] = field(default_factory=list)  # encoder layers that are read side by side, from 0; empty: the last
    conformer: EncoderConfig = field(default_factory=lambda: EncoderConfig(n_layers=0))  # n_layers Conformer layers before the linear one
    qformer: QFormerConfig = field(default_factory=QFormerConfig)  # queries that read encoder_layers


@dataclass
class RopeScaling:
    """How the frequencies of rotary positions are slowed to reach beyond the length of pretraining."""

    kind: str = "none"  # none | linear (all) | llama3 (low ones) | yarn (by rotations) | dynamic, longrope (by the length of a document)
    factor: float = 1.0  # how many times slower
    trained_positions: int = 8192  # all but linear: length of pretraining
    low_frequency: float = 1.0  # llama3: turns within that length below which a frequency is slowed in full
    high_frequency: float = 4.0  # llama3: turns above which it is kept
    beta_fast: float = 32.0  # yarn: turns above which a frequency is kept
    beta_slow: float = 1.0  # yarn: turns below which it is slowed in full
    attention_factor: float | None = None  # yarn, longrope: factor on rotated queries and keys; null: the formula of their authors
    truncate: bool = True  # yarn: kept and slowed frequencies begin at whole numbers
    short_factors: list[float] = field(default_factory=list)  # longrope: how many times slower each is in documents of the trained length
    long_factors: list[float] = field(default_factory=list)  # longrope: the same in longer ones


@dataclass
class DecoderConfig:
    """Hybrid language model: one letter of `pattern` a layer."""

    pattern: str = "M*"  # M Mamba-2, * attention, W attention within a window, E mixture of experts, - dense MLP
    d_model: int = 2688  # width
    vocab_size: int = 131072  # tokens that the model knows
    vocab_multiple: int = 1  # embedding and head have rows up to a multiple of this (and of 128 tp); those beyond vocab_size take no part
    tie_embeddings: bool = False  # use the embedding as head
    norm_eps: float = 1e-5  # epsilon of every RMSNorm
    post_norm: bool = False  # a second RMSNorm in each layer, on what it adds to its input
    init_std: float = 0.02  # standard deviation of the weight initialisation
    n_heads: int = 32  # query heads of an attention layer
    n_kv_heads: int = 2  # key and value heads
    head_dim: int = 128  # size of an attention head
    rope_theta: float | None = None  # base of rotary positions; null: none
    rope_fraction: float = 1.0  # share of a head, its first numbers, that is rotated
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)  # beyond the length of pretraining
    attention_bias: bool = False  # biases in the attention projections
    attention_out_bias: bool = True  # where there are biases, also in the output projection
    window: int = 4096  # layers W: a token sees itself and the window - 1 tokens before
    qk_norm: bool = False  # RMSNorm over each query and key head
    mamba_heads: int = 64  # heads of a Mamba-2 layer
    mamba_head_dim: int = 64  # size of a Mamba head
    mamba_groups: int = 8  # groups that share B and C
    mamba_state: int = 128  # state size a head
    mamba_conv: int = 4  # taps of the causal convolution
    mamba_chunk: int = 128  # tokens a chunk of the scan
    mamba_bias: bool = False  # biases in the input and output projections of a Mamba-2 layer
    mamba_conv_bias: bool = True  # biases of its convolution
    time_step_min: float = 0.001  # lower end of the initial step sizes, and the lower limit of dt
    time_step_max: float = 0.1  # upper end of the initial step sizes
    mlp_ffn: int = 0  # hidden width of a dense MLP layer
    mlp_bias: bool = False  # biases in dense MLPs, the shared expert and the latent projections
    activation: str = "relu2"  # relu2 | swiglu, of experts and MLP
    n_experts: int = 128  # routed experts a layer
    top_k: int = 6  # experts a token
    moe_ffn: int = 1856  # hidden width of a routed expert
    shared_ffn: int = 3712  # hidden width of the shared expert; 0: none
    moe_latent: int = 0  # width in which the routed experts work, between two projections; 0: d_model, without them
    router: str = "sigmoid"  # sigmoid | softmax scores, in fp32
    router_bias: bool = True  # a score correction that moves the choice of experts, not their weights
    n_group: int = 1  # groups of experts for group-limited choice
    topk_group: int = 1  # groups a token may choose from
    norm_topk: bool = True  # divide the chosen scores by their sum
    routed_scaling: float = 2.5  # factor on the routed experts' weights
    bias_update_rate: float = 0.0  # step of the loss-free balancing of the score-correction bias; 0: off
    aux_loss_coeff: float = 0.0  # weight of the auxiliary loss that balances experts, summed over layers; 0: none
    force_balance: bool = False  # for benchmarks: tokens take the experts in turn, whatever their scores


@dataclass
class LoraConfig:
    """Low-rank updates of frozen projections; see model/lora.py."""

    start: str | None = None  # folder that peft has saved for model.pretrained, to start from; its settings replace those below
    rank: int = 0  # inner width of an update; 0: no LoRA
    ranks: dict[str, int] = field(default_factory=dict)  # other ranks: regular expression at the start of a path -> rank
    alpha: float = 16.0  # an update is multiplied by alpha / rank; as in peft it does not follow the rank: set both
    rslora: bool = False  # by alpha / sqrt(rank) instead
    dora: bool = False  # learn the length of each row of an updated matrix too
    dropout: float = 0.0  # share of an update's inputs that is dropped in training
    targets: list[str] = field(default_factory=lambda: [r"decoder\.layers\.\d+\.(?!out_proj)"])  # patterns at the start of a path


@dataclass
class ModelConfig:
    encoder: EncoderConfig | None = field(default_factory=EncoderConfig)  # speech encoder; null: a language model alone
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)  # what joins encoder and language model
    decoder: DecoderConfig = field(default_factory=DecoderConfig)  # language model
    pretrained: str | None = None  # published folder to start from; its sizes replace the ones above, the command line's go over both
    pretrained_encoder: str | None = None  # another one, or NeMo's .nemo file, of which only the encoder is taken
    lora: LoraConfig = field(default_factory=LoraConfig)  # low-rank updates
    freeze_params: list[str] = field(default_factory=list)  # regular expressions at the start of a path: what is not trained
    prevent_freeze_params: list[str] = field(default_factory=list)  # exceptions from these: what is trained all the same


@dataclass
class RowSize:
    """Static sizes of one packed row; see data/packing.py."""

    tokens: int = MISSING  # text tokens and audio frames of all utterances
    audio_frames: int = 0  # encoder frames (80 ms) that the flat audio row holds, gaps included; text has none
    utterances: int = MISSING  # most utterances in a row
    utterance_frames: int = 0  # most encoder frames of one utterance; text has none
    label_tokens: int = 0  # most transcript tokens of one utterance (for CTC); text needs none


@dataclass
class DataConfig:
    """Where utterances come from and how they are packed."""

    kind: str = "manifest"  # manifest (NeMo JSONL, Lhotse cuts) | text (JSONL, parquet; for model.encoder=null) | digits (the demo)
    manifest: str = MISSING  # training manifest, a path
    validation: dict[str, str] = field(default_factory=dict)  # name -> manifest of each validation set
    tokenizer: str = MISSING  # path of a tokenizer.json or of sentencepiece's tokenizer.model, or of the folder that holds it
    prompt_format: str = "plain"  # strings around the turns, a key of data/prompts.py: nemotron-nano-v3 | qwen3 | llama3 | ...
    system: str | None = None  # system turn; null: what the format prescribes
    prompt: str = "<|audio|>"  # the user's turn; <|audio|> marks the frames
    audio_token: str = "<|audio|>"  # the placeholder in prompt; added to a tokenizer that has no such token
    eos_token: str | None = None  # ends an answer, always supervised; null: the format's own
    encoder: str = "fastconformer"  # whose frames are counted; config.yaml sets it to model.encoder.kind
    queries: int = 0  # audio tokens of an utterance; 0: its frames; config.yaml sets it to model.projector.qformer.queries
    sample_rate: int = 16000  # Hz; other rates are resampled
    channels: str = "mean"  # mean | first | error, for files with several channels
    rows: list[RowSize] = field(default_factory=list)  # allowed row sizes, smallest first
    multiple: int = 1  # the slots of an utterance are a multiple of this (and of 2 cp with parallel.cp_split=document)
    shuffle: bool = True  # draw a new order every epoch
    on_bad_audio: str = "fail"  # fail | skip: unreadable, empty or truncated audio
    on_bad_text: str = "fail"  # fail | skip: empty or non-string text
    on_too_long: str = "fail"  # fail | skip: an utterance that fits in no row
    max_skipped: float = 0.001  # share of skipped utterances above which the run stops
    workers: int = 1  # data worker processes a rank; never more than processors
    timeout_sec: int = 120  # longest wait for a batch
    curriculum_steps: int = 0  # digits: string length grows from 1 to its maximum over these steps
    min_words: int = 3  # digits: shortest string
    max_words: int = 7  # digits: longest string
    validation_utterances: int = 100  # digits: held-out strings to validate on


@dataclass
class ParallelConfig:
    """Sizes of the mesh; the data-parallel size is what they leave of the number of processes."""

    zero_stage: int | str = 3  # 0 all is replicated | 1 moments sharded | 2 gradients too | 3 weights too; or a name of parallel/names.py
    dp_replicate: int = 1  # groups of processes that each keep a whole sharded copy of the state (HSDP)
    pp: int = 1  # ranks of the pipeline, each with some of the layers
    pp_schedule: str = "1f1b"  # gpipe | 1f1b | interleaved_1f1b | looped_bfs | zero_bubble | zbv | dualpipev, of train.accumulate rows
    pp_chunks: int = 1  # stages a rank of the pipeline: 2 or more for interleaved_1f1b and looped_bfs, 2 for zbv and dualpipev
    pp_layers: list[int] = field(default_factory=list)  # decoder layers of each of the pp * pp_chunks stages; empty: balanced by cost
    cp: int = 1  # processes over which the slots of a row are split
    cp_split: str = "row"  # row (cut as it is, nothing is padded) | document (each utterance is padded and cut: DualChunkSwap)
    cp_attention: str = "auto"  # keys and values of other ranks: gather | ring (no rank has all) | auto (the one that keeps less memory)
    tp: int = 1  # processes over which heads and hidden columns are split
    ep: int = 1  # processes over which the experts are split
    ep_dispatch: str = "allgather"  # allgather (static shapes) | alltoall (fewer bytes, but waits for the device) | deepep
    reshard_after_forward: bool = True  # free gathered weights after a layer's forward and gather them again in backward
    reshard_experts_after_forward: bool = True  # the same for the experts
    reduce_dtype: str = "fp32"  # of gradients on their way: fp32 (or wider) | bf16 (half the bytes, sums are rounded)
    offload: str = "none"  # to the host: none | optimizer (fp32 parameters, moments, update) | parameters (the shards that compute too)
    defer_grad_sync: bool | str = "auto"  # reduce gradients once a step, at the last micro-batch; auto: where the memory allows


@dataclass
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = 1e-4  # highest learning rate
    min_lr: float = 1e-6  # learning rate at the end
    warmup_steps: int = 1000  # steps of linear warm-up
    betas: tuple[float, float] = (0.9, 0.98)  # decay of the first and second moment
    eps: float = 1e-8  # added to the denominator
    weight_decay: float = 0.01  # on matrices; not on norms, biases and one-dimensional parameters
    clip_norm: float = 1.0  # highest global gradient norm; 0: no clipping
    master_dtype: str = "fp32"  # of the parameters that are updated: fp32 (or wider) | bf16 (half the memory, but small steps are lost)
    moment_dtype: str = "fp32"  # of the two moments: fp32 (or wider) | bf16 (half the memory, rounded after each update)


@dataclass
class TrainConfig:
    """The loop."""

    steps: int = 100000  # optimizer steps; also the length of the schedule
    accumulate: int = 1  # micro-batches a step on each rank
    activation_checkpointing: str = "none"  # of decoder layers: none | selective | full | a share between 0 and 1 that compiled ones keep
    activation_checkpointing_encoder: str = "none"  # the same for the encoder
    ctc_weight: float = 0.0  # weight of the auxiliary CTC loss on the encoder; 0: no CTC head
    log_every: int = 10  # steps between log lines
    validate_every: int = 1000  # steps between validations, the last step is one too; 0: never
    decode_every: int = 0  # steps between decodings of the validation sets, the last step is one too; 0: only that
    decode_at_start: bool = False  # decode before the first step too
    checkpoint_every: int = 1000  # steps between checkpoints, the last step is one too; 0: only that
    keep_checkpoints: int = 2  # newest checkpoints kept besides the best
    resume: str = "auto"  # auto (newest in run_dir; a finished run is set aside) | never (sets all aside) | path of a checkpoint or run


@dataclass
class GenerationConfig:
    """How answers are written, while a run decodes its validation sets and by evaluate.py."""

    max_new_tokens: int = 128  # longest answer
    temperature: float = 0.0  # of the distribution that a token is drawn from; 0: always the likeliest
    top_p: float = 1.0  # draw among the likeliest tokens whose probabilities together reach this
    stop_tokens: list[str] = field(default_factory=list)  # end an answer, besides data.eos_token and those of data.prompt_format
    seed: int = 0  # of the draws


@dataclass
class CompileConfig:
    """torch.compile."""

    enabled: bool = True  # false runs everything eagerly
    generation: bool = False  # compile the steps of generation too: worth it on a GPU
    scope: str = "layer"  # layer (each kind compiled once) | step (forward and backward one graph each)
    cuda_graph: bool = False  # a GPU records a step once for each shape of its rows, and then repeats it without the host

    @property
    def one_graph(self) -> bool:
        """Whether a step is one graph, within which nothing can be done by hand."""
        return self.enabled and self.scope == "step"


@dataclass
class Config:
    """The whole configuration."""

    model: ModelConfig = field(default_factory=ModelConfig)  # what is trained
    data: DataConfig = field(default_factory=DataConfig)  # on what
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # over which processes
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # how it is updated
    train: TrainConfig = field(default_factory=TrainConfig)  # for how long
    generation: GenerationConfig = field(default_factory=GenerationConfig)  # how its answers are written
    compile: CompileConfig = field(default_factory=CompileConfig)  # how it is compiled
    precision: str = "bf16"  # bf16 | fp32 | fp64: compute dtype; parameters, moments and reductions are fp32, or fp64
    seed: int = 0  # of initialisation and data order
    run_dir: str = MISSING  # logs and checkpoints go here


@dataclass
class EvaluateConfig:
    """evaluate.py: what to transcribe, with which checkpoint."""

    checkpoint: str = MISSING  # a run's folder (its best checkpoint, else its newest) or one checkpoint
    audio: str | None = None  # one audio file
    manifest: str | None = None  # a manifest with transcripts
    set: str | None = None  # a validation set of the run; without audio, manifest and set: all of them
    output: str | None = None  # JSONL of references and hypotheses; default: beside the checkpoint
    max_new_tokens: int | None = None  # longest answer; default: that of the run
    temperature: float | None = None  # of the draws; default: that of the run
    top_p: float | None = None  # share of the probability to draw from; default: that of the run
    normalizer: str = "none"  # none | basic | english: Whisper's, before words and characters are compared
    bleu_tokenizer: str = "13a"  # of sacrebleu: 13a | zh | ja-mecab | char | ...
