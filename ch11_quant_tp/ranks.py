"""The processes of a tensor parallel engine: started, connected, told what to do, and ended.

It knows processes, sockets and plain data; what the ranks compute is worker.py's business.

    rank 0: Ranks.start -> python -m ch11_quant_tp.worker, a process a rank -> Ranks.send(plan) -> ... -> Ranks.close

Under torchrun the processes exist already, possibly on several machines: then nothing is started here, only connected.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from shared.errors import SetupError

PATIENCE = timedelta(days=365)  # of a collective: an idle rank waits for the next plan as long as it takes
START_SECONDS = 300.0  # for the ranks to load their shards


def launched_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def connect(rank: int, size: int, store: dist.Store | None = None) -> None:
    """Join the group of all ranks; without a store, where torchrun's variables say. gloo on CPU, nccl on CUDA."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if store is None:
        dist.init_process_group(backend, timeout=PATIENCE)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)


def receive() -> Any:
    """What rank 0 has sent: plain data, or None for the end."""
    box: list[Any] = [None]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


class Ranks:
    """Ranks 1 to size - 1, as rank 0 sees them.

    settings: the engine's, as JSON has them; failed: called with a sentence, from another thread, if a rank ends.
    """

    def __init__(self, size: int, settings: dict[str, Any], failed: Callable[[str], None]) -> None:
        self.size, self.settings, self.failed = size, settings, failed
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = threading.Event()
        self._threads_before = torch.get_num_threads()

    def start(self) -> None:
        """Start the ranks, wait until each has loaded its shard, and connect. Raises SetupError if one doesn't."""
        if dist.is_initialized():
            raise SetupError("TP: another engine of this process has its ranks already. Close it first.")
        self._closing.clear()
        if launched_by_torchrun():
            connect(0, self.size)
            return
        loopback = next((name for name in ("lo", "lo0") if name in psutil.net_if_addrs()), None)
        if loopback:  # gloo would look for an address by the machine's name, which may not be known
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        threads = max(1, self._threads_before // self.size)
        torch.set_num_threads(threads)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        for rank in range(1, self.size):
            task = {"rank": rank, "size": self.size, "port": store.port, "settings": self.settings}
            command = [sys.executable, "-m", "ch11_quant_tp.worker", json.dumps(task)]
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            self._processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        try:
            self._wait_until_loaded(store)
        except BaseException:
            self.close(say_so=False)
            raise
        connect(0, self.size, store)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _wait_until_loaded(self, store: dist.Store) -> None:
        ends = time.monotonic() + START_SECONDS
        while not store.check([f"loaded/{rank}" for rank in range(1, self.size)]):
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() is not None:
                    raise SetupError(
                        f"TP={self.size}: rank {rank} ended with status {process.returncode} at its start."
                    )
            if time.monotonic() > ends:
                raise SetupError(f"TP={self.size}: the ranks weren't ready within {START_SECONDS:.0f} s.")
            time.sleep(0.05)

    def _watch(self) -> None:
        """A rank that ends while nothing is computed would be noticed by nobody."""
        while not self._closing.wait(0.5):
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() is not None and not self._closing.is_set():
                    self.failed(f"rank {rank} has ended with status {process.returncode}")
                    return

    def send(self, what: Any) -> None:
        """Give all ranks the same plain data. Raises RuntimeError if one is gone."""
        dist.broadcast_object_list([what], src=0, device=torch.device("cpu"))

    def close(self, say_so: bool = True) -> None:
        """End the ranks, by a word or, if they can't hear it, by force. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        all_alive = all(process.poll() is None for process in self._processes)
        if say_so and all_alive and dist.is_initialized():
            with suppress(RuntimeError):  # the connection is broken, and so is the rank
                self.send(None)
        for process in self._processes:
            if not (say_so and all_alive):
                process.kill()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes = []
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(self._threads_before)
