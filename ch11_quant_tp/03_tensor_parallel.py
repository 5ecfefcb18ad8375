"""Tensor parallelism by hand: an mlp cut in two, in two real processes, with one sum; equal to one process.

python 03_tensor_parallel.py: two processes -> column parallel, row parallel, all_reduce -> differences, bytes, time
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

HIDDEN, INTERMEDIATE, TOKENS = 576, 1536, 16
LAYERS = 30


def weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(TOKENS, HIDDEN, generator=generator),
        torch.randn(INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5,
        torch.randn(HIDDEN, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5,
    )


def rank_main(rank: int, size: int, port: int) -> None:
    """What each process does."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.set_num_threads(1)
    x, up, down = weights()  # every rank has the whole x, and cuts its part out of the weights
    mine = slice(rank * INTERMEDIATE // size, (rank + 1) * INTERMEDIATE // size)

    # Column parallel: some outputs of the first product each. Nothing is sent: the activation works on each by itself.
    part = torch.relu(x @ up[mine].T)  # [T, intermediate / size]
    # Row parallel: those are just the inputs of the second product that this rank has weights for.
    out = part @ down[:, mine].T  # [T, hidden], a part of the sum
    before = out.clone()
    dist.all_reduce(out)  # the one thing that is sent

    exact = torch.relu(x @ up.T) @ down.T
    began = time.perf_counter()
    for _ in range(50):
        dist.all_reduce(before)
    each = (time.perf_counter() - began) / 50
    for turn in range(size):  # one after the other, so that the lines don't mix
        dist.barrier()
        if turn == rank:
            held, difference = part.shape[1] * HIDDEN * 2, (out - exact).abs().max()
            print(f"   rank {rank}: columns {mine.start} to {mine.stop} of {INTERMEDIATE}, {held:,} weights;")
            print(f"           differs from one process by {difference:.0e}; an all_reduce took {each * 1e3:.2f} ms")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    print(
        "An mlp of 576 -> 1536 -> 576 for 16 tokens, in two processes. Each has half the columns of the first matrix,"
    )
    print("and the rows that belong to them of the second. Predict: how many sums does a whole transformer layer need,")
    print("and how many bytes are sent for a token?\n")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.start_processes(rank_main, args=(2, store.port), nprocs=2, start_method="spawn")
    print("\nTwo sums a layer: one after attention, which is cut by heads, and one after the mlp.")
    sent = 2 * LAYERS * HIDDEN * 4 / 1e3
    print(f"For a token, 2 x {LAYERS} layers x {HIDDEN} numbers x 4 bytes = {sent:.0f} kB go through them, and")
    print(f"{2 * LAYERS} times the ranks wait for each other. Without a fast link that costs more than it saves.")


if __name__ == "__main__":
    main()
