"""Settings of the host process that make CPU tensors cheap."""

import ctypes
import os
import sys

# glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4


def keep_freed_memory() -> None:
    """Let malloc keep what tensors free, and give large tensors huge pages. Call it before the first tensor.

    By default glibc maps every large tensor anew and the kernel fills it with zeros page by page, at a tenth of the speed of memory.
    Freed memory then stays with the process: its size is that of the largest step. Other C libraries are left alone.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch's allocator reads it at its first allocation
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_MMAP_MAX, 0), (_MMAP_THRESHOLD, 2**30), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**26)):
            mallopt(option, value)
