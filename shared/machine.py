"""What this machine is, and what it could do at best: the two limits that every measurement is held against.

Decoding one request reads all weights once a token, so memory bandwidth bounds it; prefill multiplies every weight with
every token, so arithmetic bounds it. It knows no engine; a model is a number of weights to it.

    device -> measure_bandwidth, measure_flops -> limits -> tokens/s
    process id -> PeakMemory -> bytes
"""

import functools
import math
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil
import torch

P = ParamSpec("P")
R = TypeVar("R")

BUFFER_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}  # far more than the caches hold


@dataclass(frozen=True)
class Limits:
    """The most that a model of `weight_bytes` could reach on a device with this bandwidth [bytes/s] and FLOP/s.

    decode_tokens_per_s: at batch 1, each token reads all weights.
    prefill_tokens_per_s: each weight costs a multiplication and an addition a token.
    """

    bandwidth: float
    flops: float
    weight_bytes: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float


def in_own_thread(function: Callable[P, R]) -> Callable[P, R]:
    """Run each call of `function` in a thread of its own, which ends with the call.

    OpenMP gives every thread that computes in parallel a team of helpers, for as long as that thread lives. Helpers
    spin between two tasks, which takes a microsecond, but as soon as all teams together are larger than the number
    of cores they sleep instead, and waking them takes fifty. So the thread that runs the model must be the only one
    with a team: whatever else computes for a while, such as loading, leaves none behind.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with ThreadPoolExecutor(max_workers=1) as executor:
            return executor.submit(function, *args, **kwargs).result()

    return run


@in_own_thread
def limits(
    weight_count: int, dtype: torch.dtype, device: torch.device | str = "cpu", weight_bytes: int | None = None
) -> Limits:
    """Measure the device and say what it allows a model of `weight_count` weights; takes a second or two.

    weight_bytes: the weights' size in memory if `dtype` doesn't tell it, as with quantised ones.
    """
    bandwidth, flops = measure_bandwidth(device), measure_flops(device, dtype)
    weight_bytes = weight_bytes or weight_count * dtype.itemsize
    return Limits(bandwidth, flops, weight_bytes, bandwidth / weight_bytes, flops / (2 * weight_count))


def measure_bandwidth(device: torch.device | str = "cpu") -> float:
    """Bytes/s at which the device reads memory: the best of several matrix-vector products, as decoding is made of."""
    device = torch.device(device)
    columns = 8192
    rows = BUFFER_BYTES.get(device.type, BUFFER_BYTES["cpu"]) // (4 * columns)
    matrix = torch.ones(rows, columns, device=device)  # not torch.empty: an untouched page isn't in memory at all
    vector = torch.ones(columns, device=device)
    matrix @ vector  # the first call starts threads and loads kernels
    return matrix.nbytes / min(seconds_of(lambda: matrix @ vector, device) for _ in range(8))


def measure_flops(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """FLOP/s of products of two n by n matrices, 2 n^3 operations: the best of growing n, for about a second."""
    device = torch.device(device)
    ends, n, fastest = time.perf_counter() + 1.0, 256, 0.0
    while True:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        seconds = min(seconds_of(functools.partial(torch.matmul, a, b), device) for _ in range(3))
        fastest = max(fastest, 2 * n**3 / seconds)
        if n >= 8192 or time.perf_counter() + 3 * 8 * seconds > ends:  # twice the n takes eight times as long
            return fastest
        n *= 2


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """How long one call of `work` takes, to the end of what it started on the device."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it. A CPU has, when the call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def describe(device: torch.device | str = "cpu") -> dict[str, str | int]:
    """The machine and the versions that a result depends on."""
    device = torch.device(device)
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        "processor": processor_name(),
        "cores": available_cores(),
        **gpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "platform": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def busy_share(interval_s: float = 0.5) -> float:
    """The share of all cores' time that programs take now, to be asked for before anything is measured.

    Threads of a matrix product wait for each other: where another program takes a core, all of them become slow.
    """
    return psutil.cpu_percent(interval_s) / 100


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that can still be had on the device; on CPU, what a container's limit leaves if that is less."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")  # version 2; a container sees its own group here
    with suppress(OSError, ValueError, KeyError):  # there is none, or its limit is "max"
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])  # that would be given back
        free = min(free, int((group / "memory.max").read_text()) - used)
    return max(0, free)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """torch.zeros whose pages take no memory on CPU until they are written: the system hands them out as zeros.

    Not numpy's: it asks for pages of 2 MB, and a cache that is filled in many places would take all of them at once.
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype).view(shape)


def available_cores() -> int:
    """Cores that this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """The processor's name as its maker writes it, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class PeakMemory:
    """The most memory [bytes, resident] that a process and its children held together while the block ran."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._process = psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, self._resident())
            if self._stop.wait(0.1):
                return

    def _resident(self) -> int:
        total = 0
        try:
            for process in (self._process, *self._process.children(recursive=True)):
                total += process.memory_info().rss
        except psutil.Error:
            pass  # it ended between two looks
        return total
