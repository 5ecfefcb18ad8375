"""Attention over blocks: in plain torch, which copies a sequence's blocks together first, and in C++, which doesn't.

It knows block tables and tensors; it knows no sequence, scheduler or engine.

    tables, starts, counts -> Batch -> store k, v of the new tokens -> paged_attention(q) [T, H, D]
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shared import native

KERNEL_DIMS = (8, 16, 32, 64, 80, 96, 128, 256)  # head dimensions that the kernel is built for

Scales = tuple[Tensor, Tensor]  # of the rows of int8 keys and values, [N, KV, block_size] each


def _library() -> ctypes.PyDLL | None:
    library = native.load(Path(__file__).with_name("paged_attention.cpp"))
    if library is not None:
        P, N = ctypes.c_void_p, ctypes.c_int64
        library.store.argtypes = [P, P, N, P, P, P, N, N, N, N]
        library.store_int8.argtypes = [P, P, N, P, P, P, P, P, N, N, N, N]
        library.attention.argtypes = [P, N, P, P, P, N, P, P, P, N, N, N, N, N, ctypes.c_int]
        library.attention_int8.argtypes = [P, N, P, P, P, P, P, N, P, P, P, N, N, N, N, N, ctypes.c_int]
    return library


LIBRARY = _library()


@dataclass(frozen=True)
class Batch:
    """One packed pass over S sequences with T new tokens, and where all their tokens lie.

    block_tables [S, M] int32: blocks of each sequence, padded with 0
    query_starts [S + 1] int32: sequence s has the packed rows [query_starts[s], query_starts[s + 1])
    context_lens [S] int32: tokens that are stored once this pass has stored its own
    slots [T] int64: the place of each new token, block * block_size + offset
    """

    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    slots: Tensor

    @classmethod
    def build(
        cls,
        tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        counts: Sequence[int],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> "Batch":
        """tables: blocks of each sequence; starts: tokens that each has stored; counts: new tokens of each."""
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        used = [list(table[: -(-end // block_size)]) for table, end in zip(tables, ends, strict=True)]
        longest = max(len(table) for table in used)
        slots = [
            table[position // block_size] * block_size + position % block_size
            for table, start, end in zip(used, starts, ends, strict=True)
            for position in range(start, end)
        ]
        first_rows = [0]
        for count in counts:
            first_rows.append(first_rows[-1] + count)
        return cls(
            torch.tensor([table + [0] * (longest - len(table)) for table in used], dtype=torch.int32, device=device),
            torch.tensor(first_rows, dtype=torch.int32, device=device),
            torch.tensor(ends, dtype=torch.int32, device=device),
            torch.tensor(slots, device=device),
        )


def store(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, batch: Batch, scales: Scales | None = None) -> None:
    """Put k, v [T, KV, D] of the new tokens into their places in keys, values [N, KV, block_size, D].

    With `scales` the cache is int8: each row of D numbers is divided by its largest absolute value over 127.
    """
    T, KV, D = k.shape
    block_size = keys.shape[2]
    if LIBRARY is not None and native.fits(k, v) and k.stride() == v.stride() and k.stride(1) == D and keys.is_cpu:
        sizes = T, KV, block_size, D
        if scales is not None:
            places = keys.data_ptr(), values.data_ptr(), scales[0].data_ptr(), scales[1].data_ptr()
            LIBRARY.store_int8(k.data_ptr(), v.data_ptr(), k.stride(0), batch.slots.data_ptr(), *places, *sizes)
            return
        if keys.dtype == torch.float32:
            LIBRARY.store(
                k.data_ptr(),
                v.data_ptr(),
                k.stride(0),
                batch.slots.data_ptr(),
                keys.data_ptr(),
                values.data_ptr(),
                *sizes,
            )
            return
    block, offset = batch.slots // block_size, batch.slots % block_size  # [T]
    for x, cache, which in ((k, keys, 0), (v, values, 1)):
        if scales is not None:
            scale = x.abs().amax(dim=-1) / 127  # [T, KV]
            scales[which][block, :, offset] = scale
            x = (x / scale.clamp(min=1e-30)[..., None]).round().to(torch.int8)
        cache[block, :, offset] = x


def gather_attention(q: Tensor, keys: Tensor, values: Tensor, batch: Batch, scales: Scales | None = None) -> Tensor:
    """Attention [T, H, D] of q [T, H, D] over each sequence's tokens in keys, values [N, KV, block_size, D].

    Token i of a sequence's n new ones sees the first context - n + i + 1 tokens. Each sequence's blocks are copied
    together first: this is the oracle of the kernel, and what runs where there is none.
    """
    T, H, D = q.shape
    out = q.new_empty(T, H, D)
    block_size = keys.shape[2]
    rows = batch.query_starts.tolist()
    for s, end in enumerate(batch.context_lens.tolist()):
        new = slice(rows[s], rows[s + 1])
        count = rows[s + 1] - rows[s]
        blocks = batch.block_tables[s, : -(-end // block_size)].long()

        def together(cache: Tensor, which: int, blocks: Tensor = blocks, end: int = end) -> Tensor:
            x = cache[blocks]  # [blocks, KV, block_size, D], a copy
            if scales is not None:
                x = x * scales[which][blocks][..., None]
            x = x.transpose(0, 1).flatten(1, 2)[:, :end]  # [KV, end, D]
            return x.repeat_interleave(H // x.shape[0], dim=0)  # [H, end, D]

        scores = (q[new].transpose(0, 1) @ together(keys, 0).transpose(1, 2)).float() / math.sqrt(D)  # [H, count, end]
        future = torch.ones(count, end, dtype=torch.bool, device=q.device).triu(end - count + 1)
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1).to(q.dtype)
        out[new] = (weights @ together(values, 1)).transpose(0, 1)
    return out


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, batch: Batch, scales: Scales | None = None) -> Tensor:
    """What `gather_attention` computes, with the blocks read in place where there is a kernel for it.

    A sequence's rows are the same, bit for bit, whatever else is in the batch and however many threads run.
    """
    T, H, D = q.shape
    fits = native.fits(q) and q.stride(1) == D and keys.is_cpu and keys.dtype in (torch.float32, torch.int8)
    if LIBRARY is None or D not in KERNEL_DIMS or not fits:
        return gather_attention(q, keys, values, batch, scales)
    KV, block_size = keys.shape[1:3]
    S, M = batch.block_tables.shape
    out = torch.empty(T, H, D)
    where = (
        batch.block_tables.data_ptr(),
        M,
        batch.query_starts.data_ptr(),
        batch.context_lens.data_ptr(),
        out.data_ptr(),
    )
    sizes = S, H, KV, block_size, D, torch.get_num_threads()
    if scales is None:
        LIBRARY.attention(q.data_ptr(), q.stride(0), keys.data_ptr(), values.data_ptr(), *where, *sizes)
    else:
        quantised = keys.data_ptr(), values.data_ptr(), scales[0].data_ptr(), scales[1].data_ptr()
        LIBRARY.attention_int8(q.data_ptr(), q.stride(0), *quantised, *where, *sizes)
    return out
