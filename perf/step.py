"""One training step (forward, backward, AdamW) of the hybrid decoder against transformers' NemotronHForCausalLM.

Same weights, tokens and threads, in one process, alternating, a fresh batch each step, medians. Theirs is the faster of eager and
compiled. With lengths "speech", theirs pads 24 utterances to the longest, ours packs them; both are counted in real tokens.
"""

import copy
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.linear import LIBRARIES
from model import decoder, params
from perf.nemotron import CONFIG, fixed_choices, product_flops, their_names, transformers_model
from perf.text_model import OPTIMIZER, Row, TextModel, pack, single_process
from perf.timing import seconds
from training.step import DTYPES

SLOT_MULTIPLE = 128  # slots of a packed row
LOGIT_TOLERANCE = 1e-4
NEAR_TIES = 1e-3  # most tokens, of all, that rounding may send to other experts
ACCURACY_BATCHES = 5


@dataclass
class Batch:
    """The same utterances padded and packed."""

    utterances: list[Tensor]

    @property
    def tokens(self) -> int:
        return sum(len(u) for u in self.utterances)

    def padded(self) -> dict[str, Any]:
        """Arguments of transformers' forward."""
        ids = torch.nn.utils.rnn.pad_sequence(self.utterances, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(u) for u in self.utterances], batch_first=True)
        labels = ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "labels": labels, "use_cache": False} | ({} if bool(mask.all()) else {"attention_mask": mask})

    def mask(self) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.ones_like(u) for u in self.utterances], batch_first=True).bool()

    def packed(self, dtype: torch.dtype) -> Row:
        return pack(self.utterances, -(-self.tokens // SLOT_MULTIPLE) * SLOT_MULTIPLE, CONFIG, dtype)


def batches(kind: str) -> Iterator[Batch]:
    """Endless batches of fresh tokens. The lengths of "speech" are drawn once and come in another order each time, so that every step
    of either side has the same shape and neither compiles again."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((4,), 512)
    if kind == "speech":
        lengths = torch.empty(24).log_normal_(5.0, 0.9, generator=generator).clamp(30, 600).long()
    while True:
        order = torch.randperm(len(lengths), generator=generator)
        yield Batch([torch.randint(0, CONFIG.vocab_size, (int(n),), generator=generator) for n in lengths[order]])


def run(dtype: str, lengths: str, rounds: int) -> tuple[dict[str, Any], bool]:
    """The figures, and whether the results agree closely enough for them to mean anything."""
    kind, source = DTYPES[dtype], batches(lengths)
    weights = params.init(decoder.spec(CONFIG), seed=0)
    accuracy = _accuracy(weights, source)
    correct = accuracy["max_logit_error"] <= LOGIT_TOLERANCE and accuracy["tokens_of_other_experts"] <= NEAR_TIES
    if not correct:
        return accuracy, False
    ours = TextModel(CONFIG, kind, copy.deepcopy(weights), single_process())
    theirs = _faster(_their_steps(weights, kind), source)
    steps = {"ours": lambda batch: ours.step(batch.packed(kind)), "theirs": theirs}
    medians, rate, tokens = _alternate(steps, source, rounds or (5 if lengths == "speech" else 9), kind)
    batch = next(source)
    return {
        "ratio": round(medians["theirs"] / medians["ours"], 3),
        "ours_tokens_per_s": round(tokens / medians["ours"]),
        "theirs_tokens_per_s": round(tokens / medians["theirs"]),
        "matmul_share": round(product_flops(CONFIG) * tokens / medians["ours"] / rate, 3),
        **accuracy,
        "fill": round(batch.tokens / batch.mask().numel(), 3),
        "dtype": dtype, "threads": torch.get_num_threads(), "product_gflops": round(rate / 1e9),
    }, True


def _their_steps(weights: Any, dtype: torch.dtype) -> dict[str, Callable[[Batch], Any]]:
    model = transformers_model(CONFIG, weights, dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
                                  weight_decay=OPTIMIZER.weight_decay, fused=True)

    def step(forward: Callable[..., Any], batch: Batch) -> None:
        forward(**batch.padded()).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    compiled = torch.compile(model)
    return {"eager": lambda batch: step(model, batch), "compiled": lambda batch: step(compiled, batch)}


def _faster(steps: dict[str, Callable[[Batch], Any]], source: Iterator[Batch]) -> Callable[[Batch], Any]:
    """After a warm-up, the step whose better of two is the quickest."""
    for step in steps.values():
        step(next(source))
    return steps[min(steps, key=lambda name: min(seconds(functools.partial(steps[name], next(source))) for _ in range(2)))]


def _alternate(steps: dict[str, Callable[[Batch], Any]], source: Iterator[Batch], rounds: int,
               dtype: torch.dtype) -> tuple[dict[str, float], float, int]:
    """Median seconds of each step, the best rate of a 2048³ product in between (FLOP/s), and the real tokens of a batch."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    rate = 0.0
    for turn in range(rounds + 1):
        batch = next(source)
        for name, step in steps.items():
            taken = seconds(functools.partial(step, batch))
            if turn:  # the first is a warm-up
                times[name].append(taken)
        rate = max(rate, _product_rate(dtype))
    return {name: statistics.median(values) for name, values in times.items()}, rate, batch.tokens


def _product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a 2048³ product by the faster of MKL and oneDNN."""
    a, b = torch.randn(2048, 2048, dtype=dtype), torch.randn(2048, 2048, dtype=dtype)
    return 2 * 2048**3 / min(seconds(functools.partial(function, a, b)) for function in LIBRARIES.values() for _ in range(2))


def _accuracy(weights: Any, source: Iterator[Batch]) -> dict[str, float]:
    """Largest difference of fp32 logits, how much further than theirs our bf16 logits are from fp32, and the share of tokens that fp32
    rounding sends to other experts.

    For the first two, every token's experts are fixed to those that their fp32 chooses: near-ties of the router would hide the rest.
    """
    mesh, names = single_process(), their_names(CONFIG)
    theirs = {dtype: transformers_model(CONFIG, weights, dtype).eval() for dtype in DTYPES.values()}
    ours = {dtype: TextModel(CONFIG, dtype, copy.deepcopy(weights), mesh) for dtype in DTYPES.values()}
    largest, ratios, apart, tokens = 0.0, [], 0, 0
    for _ in range(ACCURACY_BATCHES):
        batch = next(source)
        mask, rows = batch.mask(), {dtype: batch.packed(dtype) for dtype in DTYPES.values()}
        ids, wide = _their_logits(theirs[torch.float32], batch)
        packed_ids = {name: _packed(i, mask, len(rows[torch.float32].tokens_T)) for name, i in ids.items()}
        model = ours[torch.float32]
        free = model.logits(rows[torch.float32])[: batch.tokens]
        apart, tokens = apart + int(((free - wide).abs().amax(1) > LOGIT_TOLERANCE).sum()), tokens + batch.tokens
        own_wide = model.logits(rows[torch.float32], fixed_choices(model.buffers, packed_ids, CONFIG))[: batch.tokens]
        largest = max(largest, float((own_wide - wide).abs().max()))
        model = ours[torch.bfloat16]
        own = model.logits(rows[torch.bfloat16], fixed_choices(model.buffers, packed_ids, CONFIG))[: batch.tokens]
        narrow = theirs[torch.bfloat16]
        kept = {names[name]: narrow.get_buffer(names[name]) for name in ids}
        _set_buffers(narrow, {names[name]: value for name, value in fixed_choices({}, ids, CONFIG).items()})
        their = _their_logits(narrow, batch)[1]
        _set_buffers(narrow, kept)
        ratios.append(float((own - own_wide).norm() / (their - wide).norm()))
    return {"max_logit_error": largest, "bf16_error_ratio": round(statistics.median(ratios), 3),
            "tokens_of_other_experts": apart / tokens}


@torch.no_grad()
def _their_logits(model: Any, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """Chosen experts [padded tokens, K] by our name of the score correction, and the logits of the real tokens."""
    ids: dict[str, Tensor] = {}

    def keep(name: str, module: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        ids[name] = output[2]

    handles = [layer.mixer.gate.register_forward_hook(functools.partial(keep, f"layers.{i}.router.bias"))
               for i, layer in enumerate(model.model.layers) if CONFIG.pattern[i] == "E"]
    logits = model(**batch.padded()).logits[batch.mask()]
    for handle in handles:
        handle.remove()
    return ids, logits


def _packed(ids: Tensor, mask: Tensor, slots: int) -> Tensor:
    """Choices of padded tokens as choices of the packed row."""
    real = ids[mask.flatten()]
    return torch.cat([real, real[:1].expand(slots - len(real), -1)])


def _set_buffers(model: Any, buffers: dict[str, Tensor]) -> None:
    for name, value in buffers.items():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, value)
