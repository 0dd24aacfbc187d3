"""The convolution of causal-conv1d."""

from torch import Tensor

from kernels.segments import documents


def conv1d_causal_conv1d(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, activation: str | None,
                         ahead: int) -> Tensor:
    """The library takes documents in its channel-last layout alone, channels in multiples of 8, and 2 to 4 taps."""
    channels, width = weight_CW.shape
    if ahead or channels % 8 or not 2 <= width <= 4:
        raise ValueError(f"causal_conv1d computes causal convolutions of 2 to 4 taps and 8 n channels, not of {width} taps, {ahead} of "
                         f"them ahead, and {channels} channels: choose another implementation")
    from causal_conv1d import causal_conv1d_fn

    x_1CT = x_TC if x_TC.stride(1) == 1 and x_TC.stride(0) % 8 == 0 else x_TC.contiguous()
    y_1CT = causal_conv1d_fn(x_1CT.T[None], weight_CW, bias_C, seq_idx=documents(segments_T).int()[None], activation=activation)
    return y_1CT[0].T
