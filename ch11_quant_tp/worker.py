"""A rank that isn't rank 0: it loads its shard, and then does what rank 0 says, one plan after the other.

It knows no request and no token's meaning; it gets numbers and takes part in the sums.

    receive -> {"num_blocks": N} -> cache -> receive -> plan -> run -> receive -> ... -> None

Rank 0 starts it. On several machines, torchrun does, with the same command on each (README.md):

    torchrun --nnodes 2 --nproc-per-node 1 --node-rank ... -m ch11_quant_tp.worker
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist
import uvicorn

from ch09_async_scheduling.plan import run
from ch10_paged_cache.engine import PagedPlan
from ch11_quant_tp.engine import FullConfig, make_cache, make_model
from ch11_quant_tp.ranks import PATIENCE, connect, launched_by_torchrun, receive
from shared.errors import SetupError


def work(config: FullConfig, rank: int, size: int, store: dist.Store | None) -> None:
    """Be rank `rank` until rank 0 says that it is over, or is gone."""
    model = make_model(config, rank)
    if store is not None:
        store.set(f"loaded/{rank}", "yes")
    connect(rank, size, store)
    try:
        cache = make_cache(config, model.config, receive()["num_blocks"], model.frequencies.device)
        while (plan := receive()) is not None:
            cache.begin(PagedPlan(**plan))
            run(model, PagedPlan(**plan), cache.attend)
    except RuntimeError as error:  # a connection was closed
        sys.exit(f"rank {rank}: the connection to the others is lost ({str(error).splitlines()[0][:200]})")
    dist.destroy_process_group()


def main() -> None:
    if launched_by_torchrun():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if rank == 0:
            host, port = os.environ.get("HOST", "127.0.0.1"), int(os.environ.get("PORT", "8011"))
            uvicorn.run("05_server:app", app_dir=str(Path(__file__).parent), host=host, port=port)
            return
        config = FullConfig()
        if config.tp != size:
            raise SetupError(f"TP={config.tp}: torchrun has started {size} ranks. Set TP={size} on every machine.")
        work(config, rank, size, None)
        return
    task = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which says when it is over
    store = dist.TCPStore("127.0.0.1", task["port"], is_master=False, timeout=PATIENCE)
    work(FullConfig(**task["settings"]), task["rank"], task["size"], store)


if __name__ == "__main__":
    main()
