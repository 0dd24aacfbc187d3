"""FastConformer against NeMo's recorded output and gradients, and against a plain encoder that is given one utterance at a time."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import EncoderConfig
from model import fastconformer, params
from model.context import Context
from model.mel import log_mel
from model.params import Tree, named_leaves
from tests.goldens import perception
from tests.model.rows import audio_row, cut
from tests.parity import nemo
from tests.parity.nemo import encode

SMALL = EncoderConfig(mel_bins=20, d_model=12, n_layers=1, n_heads=3, ff_expansion=2, conv_kernel=9, subsampling_channels=4)
FROZEN, LAYER_NORM = dataclasses.replace(SMALL, freeze_batch_norm=True), dataclasses.replace(SMALL, conv_norm="layer_norm")
Running = tuple[Tensor, Tensor]  # mean and variance of a batch norm
MEL = [8, 1, 23, 2, 24, 3, 25, 4, 7, 5, 9, 6, 0]  # 8 k - 1, 8 k, 8 k + 1 and the shortest


def weights(cfg: EncoderConfig, dtype: torch.dtype = torch.float64) -> Tree:
    """Random weights and running statistics with values that bf16 holds exactly."""
    def value(path: str, p: params.P) -> Tensor:
        if p.kind == "buffer":
            return (0.5 + torch.rand(p.shape)).bfloat16().to(torch.promote_types(dtype, torch.float32))
        scale = 1 + 0.2 * torch.randn(p.shape) if p.init == "ones" else 0.4 * torch.randn(p.shape)
        return scale.bfloat16().to(dtype).requires_grad_()
    return params.map_named(value, fastconformer.spec(cfg))


def trained(w: Tree) -> dict[str, Tensor]:
    return {path: t for path, t in named_leaves(w) if t.requires_grad}


def row(frames: Sequence[int], cfg: EncoderConfig, **fields: Any) -> Context:
    """The Context of utterances of these numbers of mel frames; every third ends in the middle of one."""
    waves = [torch.zeros(160 * n + 80 * (u % 3 == 0)) for u, n in enumerate(frames)]
    return audio_row(waves, cfg, **({"dtype": torch.float64} | fields))[1]


def lay(pieces: Sequence[Tensor], rate: int, ctx: Context, fill: float) -> Tensor:
    """The pieces at their places in the row, `rate` slots an encoder frame; everything else is `fill`."""
    x = pieces[0].new_full((rate * len(ctx.audio_segments_A), pieces[0].shape[1]), fill)
    for start, piece in zip(ctx.audio_starts_U.tolist(), pieces, strict=False):
        x[rate * start : rate * start + len(piece)] = piece
    return x


# A plain encoder for whole utterances, written from the definition.


def affine(w: Tree, x: Tensor) -> Tensor:
    return x @ w["weight"].flatten(1).T + w.get("bias", 0)


def norm(w: Tree, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w["weight"], w["bias"])


def plain_subsample(w: Tree, mel: Tensor) -> Tensor:
    x = mel[None, None]
    for name in ("0", "2", "3", "5", "6"):
        conv = w["conv"][name]
        pointwise = conv["weight"].shape[-1] == 1
        groups = 1 if pointwise else x.shape[1]
        x = F.conv2d(x, conv["weight"], conv["bias"], stride=1 if pointwise else 2, padding=0 if pointwise else 1, groups=groups)
        if name in ("0", "3", "6"):
            x = torch.relu(x)
    return affine(w["out"], x[0].transpose(0, 1).flatten(1))


def plain_attention(w: Tree, x: Tensor, heads: int) -> Tensor:
    length, width = x.shape
    q, k, v = (affine(w[f"linear_{name}"], x).unflatten(1, (heads, -1)) for name in "qkv")
    distances = torch.arange(length)[:, None] - torch.arange(length)
    angles = distances[:, :, None] / 10000 ** (torch.arange(width) // 2 * 2 / width)
    table = torch.where(torch.arange(width) % 2 == 0, angles.sin(), angles.cos()).to(x.dtype)
    p = (table @ w["linear_pos"]["weight"].T).unflatten(2, (heads, -1))
    scores = torch.einsum("inh,jnh->nij", q + w["pos_bias_u"], k) + torch.einsum("inh,ijnh->nij", q + w["pos_bias_v"], p)
    attended = torch.einsum("nij,jnh->inh", torch.softmax(scores / (width / heads) ** 0.5, 2), v)
    return affine(w["linear_out"], attended.flatten(1))


def plain_convolution(w: Tree, xs: list[Tensor], cfg: EncoderConfig, running: Running | None, momentum: float) -> list[Tensor]:
    """Over all utterances at once, as training statistics are those of all their frames; these move `running`."""
    taps = w["depthwise_conv"]
    mixed = [F.conv1d(F.glu(affine(w["pointwise_conv1"], x), 1).T, taps["weight"], taps.get("bias"), padding=cfg.conv_kernel // 2,
                      groups=cfg.d_model).T for x in xs]
    if running is None:
        normed = norm(w["batch_norm"], torch.cat(mixed))
    else:
        normed = F.batch_norm(torch.cat(mixed), *running, w["batch_norm"]["weight"], w["batch_norm"]["bias"], momentum > 0, momentum)
    return list(affine(w["pointwise_conv2"], F.silu(normed)).split([len(x) for x in xs]))


def plain_layer(w: Tree, xs: list[Tensor], cfg: EncoderConfig, training: bool = False) -> tuple[list[Tensor], Running | None]:
    """One Conformer layer; also the running statistics after it."""
    def feed_forward(name: str, x: Tensor) -> Tensor:
        part = w[name]
        return x + 0.5 * affine(part["linear2"], F.silu(affine(part["linear1"], norm(w[f"norm_{name}"], x))))

    xs = [feed_forward("feed_forward1", x) for x in xs]
    xs = [x + plain_attention(w["self_attn"], norm(w["norm_self_att"], x), cfg.n_heads) for x in xs]
    buffers, running = w["conv"]["batch_norm"], None
    if cfg.conv_norm == "batch_norm":
        running = buffers["running_mean"].clone(), buffers["running_var"].clone()
    mixed = plain_convolution(w["conv"], [norm(w["norm_conv"], x) for x in xs], cfg, running, 0.1 if training else 0.0)
    xs = [x + y for x, y in zip(xs, mixed, strict=True)]
    return [norm(w["norm_out"], feed_forward("feed_forward2", x)) for x in xs], running


def probed(outs: list[Tensor], probes: list[Tensor]) -> Tensor:
    return (torch.cat(outs) * torch.cat(probes)).sum()


def assert_equal_gradients(ours: Tensor, theirs: Tensor, w: Tree, *inputs: Tensor, tolerance: float, floor: float = 1e-6) -> None:
    """Errors relative to each gradient's norm, or to `floor` times the typical one: that of the keys' bias is zero but for rounding."""
    leaves = trained(w) | {f"input {i}": x for i, x in enumerate(inputs)}
    got, expected = (torch.autograd.grad(loss, list(leaves.values())) for loss in (ours, theirs))
    typical = float(torch.nn.utils.get_total_norm(expected)) / len(expected) ** 0.5
    for name, g, r in zip(leaves, got, expected, strict=True):
        assert float((g - r).norm()) <= tolerance * max(float(r.norm()), floor * typical), name


# NeMo's recorded values


def test_output_is_that_of_nemo():
    _, ctx = nemo.row(torch.float32)
    assert ctx.audio_lengths_U.tolist() == [*perception.facts()["encoded_length"], 0, 0]
    ours, golden = nemo.encoded()
    torch.testing.assert_close(ours, golden, rtol=0, atol=1e-5)


def test_gradients_are_those_of_nemo():
    """In fp64, so that the error is that of the recorded fp32 gradients; those of the keys' bias are zero but for rounding."""
    mel, ctx = nemo.row(torch.float64)
    w = perception.weights(fastconformer.spec(perception.ENCODER), torch.float64)
    probe = lay(perception.clips("probe", perception.facts()["encoded_length"]), 1, ctx, 0.0)
    leaves = trained(w)
    grads = torch.autograd.grad((encode(w, mel.double(), ctx) * probe).sum(), list(leaves.values()))
    assert len(grads) == sum(name.startswith("gradients.") for name in perception.tensors())
    for path, grad in zip(leaves, grads, strict=True):
        golden = perception.tensors()[f"gradients.{perception.theirs(path)}"]
        if path.endswith("linear_k.bias"):
            assert float(grad.norm()) < 1e-12
        else:
            assert float((grad - golden).norm()) < 5e-4 * float(golden.norm()), path


def test_parameters_have_nemos_names_shapes_and_numbers():
    ours = {f"weights.{perception.theirs(path)}": tuple(p.shape) for path, p in named_leaves(fastconformer.spec(perception.ENCODER))}
    assert ours == {name: tuple(t.shape) for name, t in perception.tensors().items() if name.startswith("weights.")}
    published = fastconformer.spec(EncoderConfig())
    assert [params.count(published[part]) for part in ("subsampling", "layers")] == [4_334_592, 32 * 25_207_808]
    assert {p.kind for path, p in named_leaves(published) if "running" in path} == {"buffer"}


# The packed row against one utterance at a time

ORDERS = {"mixed": (MEL, [0], 0), "reversed": (MEL[::-1], [0, 1, 0, 2], 3), "sorted": (sorted(MEL), [1, 0, 3], 1), "one": ([17], [0], 0)}


@pytest.mark.parametrize("cfg", [FROZEN, LAYER_NORM], ids=["frozen batch norm", "layer norm"])
@pytest.mark.parametrize("order", ORDERS)
def test_row_is_each_utterance_alone(order, cfg):
    frames, gaps, tail = ORDERS[order]
    gaps = [gaps[u % len(gaps)] for u in range(len(frames))]
    ctx = row(frames, cfg, gaps=gaps, tail=tail, unused=1, utterance_frames=6)
    w, mels = weights(cfg), [torch.randn(n, cfg.mel_bins, dtype=torch.float64) for n in frames]
    pieces = cut(encode(w, lay(mels, 8, ctx, torch.nan), ctx), ctx)
    alone = [plain_layer(w["layers"][0], [plain_subsample(w["subsampling"], mel)], cfg)[0][0] for mel in mels if len(mel)]
    assert [len(piece) for piece in pieces] == [-(-n // 8) for n in frames] + [0]
    pieces = [piece for piece in pieces if len(piece)]
    probes = [torch.randn_like(piece) for piece in pieces]
    for piece, expected in zip(pieces, alone, strict=True):
        torch.testing.assert_close(piece, expected, rtol=0, atol=1e-6)  # the table of positions is in fp32
    assert_equal_gradients(probed(pieces, probes), probed(alone, probes), w, tolerance=1e-5)


def test_training_statistics_are_those_of_batch_norm_over_all_valid_frames():
    ctx = row([n for n in MEL if n], SMALL, tail=2, unused=1)
    lengths = [n for n in ctx.audio_lengths_U.tolist() if n]
    w, xs = weights(SMALL)["layers"][0], [torch.randn(n, SMALL.d_model, dtype=torch.float64, requires_grad=True) for n in lengths]
    x_AD = lay(xs, 1, ctx, 100.0)
    out, stats = fastconformer.forward(w, x_AD, ctx)
    expected, running = plain_layer(w, xs, SMALL, training=True)
    assert running is not None
    pieces = cut(out, ctx)[:-1]
    for piece, reference in zip(pieces, expected, strict=True):
        torch.testing.assert_close(piece, reference, rtol=0, atol=1e-6)
    probes = [torch.randn_like(x) for x in xs]
    assert_equal_gradients(probed(pieces, probes), probed(expected, probes), w, *xs, tolerance=1e-5)
    assert float(stats["frames"]) == sum(lengths)
    assert not any(value.requires_grad for value in stats.values())
    buffers = {f"conv.batch_norm.{name}": w["conv"]["batch_norm"][name] for name in ("running_mean", "running_var")}
    updated = fastconformer.update(buffers, stats, SMALL)
    for got, reference in zip(updated.values(), running, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-6, atol=1e-6)


def test_update_takes_the_sums_of_several_rows_as_one():
    values = torch.randn(50, SMALL.d_model, dtype=torch.float64) * 2 + 3
    mean, var = torch.randn(SMALL.d_model, dtype=torch.float64), torch.rand(SMALL.d_model, dtype=torch.float64)
    buffers = {"conv.batch_norm.running_mean": mean.clone(), "conv.batch_norm.running_var": var.clone()}
    one, other = ({"frames": torch.tensor(float(len(part))), "sum": part.sum(0), "square_sum": part.square().sum(0)}
                  for part in values.split([7, 43]))
    updated = fastconformer.update(buffers, {name: one[name] + other[name] for name in one}, SMALL)
    F.batch_norm(values, mean, var, training=True, momentum=0.1)
    torch.testing.assert_close(updated, {"conv.batch_norm.running_mean": mean, "conv.batch_norm.running_var": var}, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frames", [0, 1])
def test_update_without_a_variance_changes_nothing(frames):
    buffers = {"conv.batch_norm.running_mean": torch.randn(4), "conv.batch_norm.running_var": torch.rand(4)}
    stats = {"frames": torch.tensor(float(frames)), "sum": frames * torch.ones(4), "square_sum": frames * torch.ones(4)}
    assert all(torch.equal(new, buffers[name]) for name, new in fastconformer.update(buffers, stats, SMALL).items())


@pytest.mark.parametrize("change", [{"training": False}, {"encoder": FROZEN}, {"encoder": LAYER_NORM}], ids=["eval", "frozen", "layer"])
def test_only_training_with_batch_norm_returns_sums(change):
    ctx = dataclasses.replace(row([20, 9], SMALL), **change)
    x_AD = torch.randn(len(ctx.audio_segments_A), 12, dtype=torch.float64)
    assert fastconformer.forward(weights(ctx.encoder)["layers"][0], x_AD, ctx)[1] == {}


@pytest.mark.parametrize("cfg", [FROZEN, LAYER_NORM], ids=["frozen batch norm", "layer norm"])
def test_an_utterance_moves_no_other(cfg):
    ctx = row([9, 24, 8], cfg)
    w, mel = weights(cfg), torch.randn(8 * len(ctx.audio_segments_A), cfg.mel_bins, dtype=torch.float64, requires_grad=True)
    first, second, third = cut(encode(w, mel, ctx), ctx)
    start = 8 * int(ctx.audio_starts_U[1])
    (grad,) = torch.autograd.grad(second.square().sum(), mel)
    assert grad[start : start + 24].any(1).all()
    assert not grad[:start].any()
    assert not grad[start + 24 :].any()
    with torch.no_grad():
        mel[start : start + 24] += 10
    moved = cut(encode(w, mel, ctx), ctx)
    assert torch.equal(moved[0], first)
    assert torch.equal(moved[2], third)
    assert not torch.equal(moved[1], second)


def test_row_of_nothing_is_finite_and_has_no_gradient():
    ctx = audio_row([torch.zeros(0)], SMALL, tail=3, dtype=torch.float64)[1]
    w = weights(SMALL)
    x_AD = fastconformer.subsample(w["subsampling"], torch.zeros(8 * 4, SMALL.mel_bins), ctx)
    out, stats = fastconformer.forward(w["layers"][0], x_AD, ctx)
    assert out.isfinite().all()
    assert float(stats["frames"]) == 0
    grads = torch.autograd.grad(0 * out.sum(), list(trained(w).values()))
    assert not any(grad.any() for grad in grads)


def test_without_biases():
    cfg = dataclasses.replace(FROZEN, bias=False)
    spec = dict(named_leaves(fastconformer.spec(cfg)["layers"][0]))
    assert all("norm" in path for path in spec if path.endswith("bias"))
    ctx, w = row([20, 9], cfg), weights(FROZEN)
    mel = torch.randn(8 * len(ctx.audio_segments_A), cfg.mel_bins, dtype=torch.float64)
    with torch.no_grad():
        for path, tensor in named_leaves(w["layers"][0]):
            if path not in spec:
                tensor.zero_()
    bare = params.map_named(lambda path, p: dict(named_leaves(w))[path], fastconformer.spec(cfg))
    torch.testing.assert_close(encode(bare, mel, ctx), encode(w, mel, ctx), rtol=1e-12, atol=1e-12)


def test_xscaling_multiplies_by_the_root_of_the_width():
    ctx, w = row([20, 9], SMALL), weights(SMALL)["subsampling"]
    mel = torch.randn(8 * len(ctx.audio_segments_A), SMALL.mel_bins)
    scaled = dataclasses.replace(ctx, encoder=dataclasses.replace(SMALL, xscaling=True))
    torch.testing.assert_close(fastconformer.subsample(w, mel, scaled), 12**0.5 * fastconformer.subsample(w, mel, ctx), rtol=1e-12, atol=0)


@pytest.mark.parametrize("cfg", [SMALL, LAYER_NORM], ids=["batch norm", "layer norm"])
def test_bf16_stays_close_to_fp64(cfg):
    ctx = row([40, 24, 17], cfg)
    w = weights(cfg)
    mel = torch.randn(8 * len(ctx.audio_segments_A), cfg.mel_bins)
    half = params.map_named(lambda path, p, t: t.float() if p.kind == "buffer" else t.detach().bfloat16(), fastconformer.spec(cfg), w)
    out = encode(half, mel, dataclasses.replace(ctx, dtype=torch.bfloat16))
    expected = encode(w, mel.bfloat16().double(), ctx)
    assert out.dtype == torch.bfloat16
    for piece, reference in zip(cut(out, ctx), cut(expected, ctx), strict=True):
        assert float((piece.detach().double() - reference.detach()).norm()) < 2e-2 * float(reference.detach().norm())


def test_position_table():
    table = fastconformer.relative_positions(4, 6, torch.device("cpu")).double()
    assert table.shape == (7, 6)
    for r, distance in enumerate(range(3, -4, -1)):
        for c in range(3):
            angle = torch.tensor(distance / 10000 ** (2 * c / 6), dtype=torch.float64)
            torch.testing.assert_close(table[r, 2 * c : 2 * c + 2], torch.stack((angle.sin(), angle.cos())), rtol=0, atol=1e-6)


def test_features_compile_to_one_graph():
    audio_S, ctx = audio_row([torch.randn(n) for n in (3000, 1400)], SMALL)
    compiled = torch.compile(log_mel, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(audio_S, ctx), log_mel(audio_S, ctx), rtol=0, atol=1e-5)


def test_encoder_compiles_to_one_graph_that_serves_other_rows():
    """Forward and backward; another row of the same size compiles nothing."""
    def loss(w: Tree, mel: Tensor, probe_AD: Tensor, ctx: Context) -> Tensor:
        out, stats = fastconformer.forward(w["layers"][0], fastconformer.subsample(w["subsampling"], mel, ctx), ctx)
        return (out * probe_AD).sum() + stats["sum"].sum()

    compiled, w = torch.compile(loss, fullgraph=True), weights(SMALL, torch.float32)
    for frames in ([30, 17, 8], [9, 33, 8]):
        ctx = row(frames, SMALL, utterance_frames=5, dtype=torch.float32)
        mel = torch.randn(8 * len(ctx.audio_segments_A), SMALL.mel_bins)
        probe_AD = lay([torch.randn(n, SMALL.d_model) for n in ctx.audio_lengths_U.tolist()], 1, ctx, 0.0)
        with torch._dynamo.config.patch(error_on_recompile=frames[0] == 9):
            got = compiled(w, mel, probe_AD, ctx)
        expected = loss(w, mel, probe_AD, ctx)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
        assert_equal_gradients(got, expected, w, tolerance=1e-4, floor=0.1)  # those of the keys are a hundredth of the typical one
