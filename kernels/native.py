"""CPU operators in C++, each compiled the first time that it is asked for and kept with what torch.compile keeps.

`python -m kernels.native` compiles all of them.
"""

import functools
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

HEADER = Path(__file__).with_name("native.h")
VECTORS = {  # by what PyTorch's own kernels use on this processor, which its vector classes have to be compiled for
    "AVX512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma"], "AVX2": ["-mavx2", "-mfma", "-mf16c"],
    "DEFAULT": []}


@functools.cache
def operators(source: Path) -> Any:
    """The namespace torch.ops.reedling_cpu, with the operators of this file in it.

    Raises RuntimeError if there is no C++ compiler or it fails.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    capability = capability if capability in VECTORS else "DEFAULT"
    flags = ["-std=c++20", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", f"-DCPU_CAPABILITY={capability}",
             f"-DCPU_CAPABILITY_{capability}", *VECTORS[capability]]
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise RuntimeError(f"{source} needs a C++ compiler and {compiler} is not there: install g++ or name another one in CXX")
    root = Path(torch.__file__).parent
    includes = [f"-I{folder}" for folder in (HEADER.parent, root / "include", root / "include/torch/csrc/api/include")]
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    key = hashlib.sha256(repr([torch.__version__, compiler, flags]).encode() + HEADER.read_bytes() + source.read_bytes()).hexdigest()[:16]
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # brings the whole compiler, seconds that a refusal has not

    library = Path(cache_dir()) / "reedling" / f"{source.parent.name}-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{library}.lock"):  # which a process that is killed gives back
            if not library.exists():
                _compile([compiler, *flags, *includes, str(source), *libraries], library)
    torch.ops.load_library(library)
    return torch.ops.reedling_cpu


def _compile(command: list[str], library: Path) -> None:
    part = library.with_suffix(f".{os.getpid()}.part")  # the compiler of a process that is killed goes on writing
    done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    part.replace(library)


if __name__ == "__main__":
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(operators, sorted(HEADER.parent.rglob("*.cpp"))))
