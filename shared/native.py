"""Build a C++ file into a shared library, once, and load it with ctypes.

It knows a compiler and a cache folder; it knows nothing of what the code does. The functions have C's calling
convention and get pointers and sizes, so the files need no header of torch and compile in a second or two.

    kernels.cpp -> c++ -O3 -march=native -> build/kernels-<hash>.so -> ctypes.PyDLL

OpenMP's threads are shared with torch: its libgomp is in the process already, under the name that the library asks for.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

BUILD = Path(__file__).resolve().parent.parent / "build"
# Sums may be regrouped, or no loop over one could use vectors. Not -ffast-math: it changes all the process's rounding.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)


@functools.cache
def load(source: Path) -> ctypes.PyDLL | None:
    """The library built from `source`, or None, with a line on stderr that says why, where it can't be built.

    NATIVE=0 in the environment asks for None: then plain torch runs, which is what the kernels are tested against.
    PyDLL keeps Python's lock during a call: the calls are short, and giving the lock away and back costs more.
    """
    if os.environ.get("NATIVE") == "0":
        return None
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or ""]
    try:
        return ctypes.PyDLL(str(_built(source, compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = "no C++ compiler was found" if not compiler[0] else "it can't be built"
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines() if compiler[0] else []
        print(
            f"{source.name}: {reason}, so plain torch runs instead, which is slower. Install g++ (Debian and Ubuntu: "
            f"apt-get install g++), or set NATIVE=0 to be asked no more. {detail[-1] if detail else ''}".rstrip(),
            file=sys.stderr,
            flush=True,
        )
        return None


def _built(source: Path, compiler: list[str]) -> Path:
    """The library's file, built if there is none of this source for this compiler and this kind of processor."""
    # What the compiler will read, with all macros: they tell its version and the processor's instructions.
    command = [*compiler, *FLAGS, str(source)]
    text = subprocess.run([*command, "-E", "-dD"], check=True, capture_output=True).stdout
    key = hashlib.sha256(text + repr(FLAGS).encode()).hexdigest()[:16]
    library = BUILD / f"{source.stem}-{key}.so"
    if not library.exists():
        BUILD.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:  # two processes may build at once; each renames its own
            fresh = Path(folder) / library.name
            subprocess.run([*command, "-o", str(fresh)], check=True, capture_output=True, text=True)
            fresh.replace(library)
    return library


def fits(*tensors: torch.Tensor) -> bool:
    """Whether a kernel can read these: float32 on CPU, rows without gaps."""
    for t in tensors:  # noqa: SIM110 (called ten times a layer, and a generator costs more than the questions)
        if t.dtype != torch.float32 or not t.is_cpu or t.stride(-1) != 1:
            return False
    return True
