"""Paged attention against plain attention: what a query sees doesn't depend on where the blocks lie or who is there."""

import itertools
import random

import pytest
import torch

from ch10_paged_cache import paged_attention as chapter
from ch10_paged_cache.paged_attention import Batch, gather_attention, paged_attention, store
from shared.model import causal_attend


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(chapter, "LIBRARY", None)
    elif chapter.LIBRARY is None:
        pytest.skip("no C++ compiler here, or NATIVE=0")
    return request.param


class Pool:
    """A cache of NaN, in which each sequence gets blocks at random, and q, k, v for all of its tokens."""

    def __init__(self, lengths: list[int], block_size: int, H: int, KV: int, D: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-length // block_size) for length in lengths]
        N = sum(needed) + 3
        blocks = list(range(N))
        random.Random(seed).shuffle(blocks)
        self.block_size, self.lengths = block_size, lengths
        self.tables = [[blocks.pop() for _ in range(n)] for n in needed]
        self.keys, self.values = (torch.full((N, KV, block_size, D), torch.nan) for _ in range(2))
        self.qkv = [torch.randn(length, H + 2 * KV, D, generator=generator) for length in lengths]
        self.split = H, KV, KV

    def step(self, starts: list[int], counts: list[int], which: list[int] | None = None) -> list[torch.Tensor]:
        """Store and answer the next `counts` tokens of the sequences `which`: [count, H, D] each."""
        which = which or list(range(len(starts)))
        batch = Batch.build([self.tables[s] for s in which], starts, counts, self.block_size)
        packed = torch.cat([self.qkv[s][a : a + n] for s, a, n in zip(which, starts, counts, strict=True)])
        q, k, v = packed.split(self.split, dim=1)  # strided views, as the model gives them
        store(self.keys, self.values, k, v, batch)
        return list(paged_attention(q, self.keys, self.values, batch).split(counts))

    def expected(self, s: int) -> torch.Tensor:
        return causal_attend(0, *self.qkv[s].split(self.split, dim=1))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("H", "KV", "D"), [(4, 2, 8), (3, 3, 16), (9, 3, 64), (4, 1, 128), (2, 1, 24)])
def test_chunks_and_decodes_in_one_batch_equal_plain_attention(way, block_size: int, H: int, KV: int, D: int):
    """Around block borders, tiles of keys and tiles of queries; NaN in every place that isn't a sequence's own."""
    lengths = [1, 2, 4, 5, 16, 17, 33, 40, 70]
    pool = Pool(lengths, block_size, H, KV, D)
    got: list[list[torch.Tensor]] = [[] for _ in lengths]
    done = [0] * len(lengths)
    chunk = itertools.cycle((1, 3, 8, 9, 21))
    while any(a < n for a, n in zip(done, lengths, strict=True)):
        which = [s for s, n in enumerate(lengths) if done[s] < n]
        counts = [min(next(chunk), lengths[s] - done[s]) for s in which]
        for s, n, out in zip(which, counts, pool.step([done[s] for s in which], counts, which), strict=True):
            got[s].append(out)
            done[s] += n
    for s in range(len(lengths)):
        torch.testing.assert_close(torch.cat(got[s]), pool.expected(s), atol=2e-5, rtol=1e-4)


def test_alone_in_a_batch_and_with_more_threads_is_the_same_bit_for_bit(way):
    pool = Pool([300, 40, 170, 9], 16, 9, 3, 64)
    pool.step([0] * 4, [260, 39, 169, 1])
    starts, counts = [260, 39, 169, 1], [40, 1, 1, 8]
    together = pool.step(starts, counts)
    for s in range(4):
        [alone] = pool.step([starts[s]], [counts[s]], [s])
        assert torch.equal(alone, together[s])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        if way == "kernel":
            assert all(torch.equal(a, b) for a, b in zip(together, pool.step(starts, counts), strict=True))
    finally:
        torch.set_num_threads(threads)


def test_large_scores_do_not_overflow(way):
    """exp of a raw score of 200 is infinite: the largest must be taken off first, and again when a larger one comes."""
    pool = Pool([100], 16, 2, 1, 8)
    pool.qkv[0] *= 20
    torch.testing.assert_close(pool.step([0], [100])[0], pool.expected(0), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_go_through_torch(dtype: torch.dtype):
    pool = Pool([20], 4, 4, 2, 16)
    pool.keys, pool.values = pool.keys.to(dtype), pool.values.to(dtype)
    pool.qkv[0] = pool.qkv[0].to(dtype)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(pool.step([0], [20])[0], pool.expected(0), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_an_int8_cache_gives_the_numbers_of_its_oracle(way, block_size: int):
    pool = Pool([5, 33, 70], block_size, 9, 3, 64)
    pool.qkv[0][2] = 0  # a row of zeros has no largest number to divide by
    N, KV = pool.keys.shape[:2]
    keys, values = (torch.zeros(pool.keys.shape, dtype=torch.int8) for _ in range(2))
    scales = torch.full((N, KV, block_size), torch.nan), torch.full((N, KV, block_size), torch.nan)
    batch = Batch.build(pool.tables, [0, 0, 0], pool.lengths, block_size)
    q, k, v = torch.cat(pool.qkv).split(pool.split, dim=1)
    store(keys, values, k, v, batch, scales)
    out = paged_attention(q, keys, values, batch, scales)
    torch.testing.assert_close(out, gather_attention(q, keys, values, batch, scales), atol=2e-5, rtol=1e-4)
    exact = torch.cat([pool.expected(s) for s in range(3)])
    assert (out - exact).abs().max() < 0.1
    assert (out - exact).abs().mean() < 0.01


def test_both_ways_store_the_same_int8(monkeypatch: pytest.MonkeyPatch):
    if chapter.LIBRARY is None:
        pytest.skip("no C++ compiler here, or NATIVE=0")
    k, v = torch.randn(7, 3, 64), torch.randn(7, 3, 64)
    batch = Batch.build([[2, 0]], [0], [7], 4)
    results = []
    for library in (chapter.LIBRARY, None):
        monkeypatch.setattr(chapter, "LIBRARY", library)
        cache = torch.zeros(2, 3, 3, 4, 64, dtype=torch.int8)
        scales = torch.zeros(2, 3, 3, 4)
        store(cache[0], cache[1], k, v, batch, (scales[0], scales[1]))
        results.append((cache, scales))
    torch.testing.assert_close(results[0][1], results[1][1])
    assert (results[0][0].int() - results[1][0].int()).abs().max() <= 1  # a tie may round either way
