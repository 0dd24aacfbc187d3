"""Settings of the host process that make CPU tensors cheap."""

import ctypes
import sys

# glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4


def keep_freed_memory() -> None:
    """Let malloc keep what tensors free. Call it before the first tensor.

    By default glibc maps every large tensor anew and the kernel fills it with zeros page by page, at a tenth of the speed of memory.
    Freed memory then stays with the process: its size is that of the largest step. Huge pages (PyTorch's THP_MEM_ALLOC_ENABLE) made steps
    slower and their times less even. Other C libraries are left alone.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_MMAP_MAX, 0), (_MMAP_THRESHOLD, 2**30), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**26)):
            mallopt(option, value)
