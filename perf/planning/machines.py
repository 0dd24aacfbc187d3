"""What GPUs can do at most, from their vendors' data sheets, and what share of it is reached."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """One GPU and its node."""

    memory_bytes: float  # as the driver reports it
    flops: float  # a second: dense products in bf16
    bandwidth: float  # bytes a second of its memory
    node: int  # GPUs of a node
    link: float  # bytes a second, one direction, between the GPUs of a node
    network: float  # bytes a second, one direction, that a GPU has to other nodes
    host_link: float  # bytes a second, one direction, between a GPU and the memory of its host
    host_bandwidth: float  # bytes a second of the host's memory, a GPU's share
    architecture: int


# NVIDIA's data sheets: H100 SXM5 80 GB, H200 SXM, HGX B200, A100 SXM4 80 GB (NVLink 4, 4, 5, 3: half of the sum of both directions), and
# Ada's white paper (165 TFLOP/s with fp32 accumulation; PCIe 4.0 x16). Networks: DGX H100, H200 and B200 have 400 Gb/s a GPU, DGX A100
# 200; a machine with consumer GPUs 25 for all of them. Hosts: PCIe 5.0 x16 has 64 GB/s one way (H100, H200, B200), 4.0 32 (A100, RTX 4090);
# two processors with 8 channels each, of DDR5-4800 (DGX H100, H200), DDR5-5600 (DGX B200) or DDR4-3200 (DGX A100, taken for the last too).
MACHINES = {
    "h100": Machine(79.6 * GIB, 989e12, 3.35e12, 8, 450e9, 50e9, 64e9, 614e9 / 8, 90),
    "h200": Machine(140.4 * GIB, 989e12, 4.8e12, 8, 450e9, 50e9, 64e9, 614e9 / 8, 90),
    "b200": Machine(178.4 * GIB, 2250e12, 7.7e12, 8, 900e9, 50e9, 64e9, 717e9 / 8, 100),
    "a100": Machine(79.2 * GIB, 312e12, 2.04e12, 8, 300e9, 25e9, 32e9, 410e9 / 8, 80),
    "rtx4090": Machine(23.6 * GIB, 165e12, 1.01e12, 8, 26e9, 0.4e9, 32e9, 410e9 / 8, 120),
}
RESERVED_BYTES = 3.0 * GIB  # the driver's context, NCCL's buffers, what the allocator cannot use
PRODUCTS = 0.80  # of flops: 790e12 of 989e12 measured on an H200 with random numbers
COPIES = 0.90  # of bandwidth: 4.3e12 of 4.8e12 measured there
LINKS = 0.80  # of links and network: nccl-tests on a DGX H100 show 360 of 450 GB/s for large messages
LATENCY_SEC = 20e-6  # of a collective, whatever its size
FP32_COST = 15.0  # how many times longer a product in fp32 takes: 989e12 against 67e12 without TF32
