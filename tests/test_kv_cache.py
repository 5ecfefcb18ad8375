"""Chapter 5's cache: what is stored is what would be computed again, wherever it lies and however it came."""

import pytest
import torch

from ch05_kv_cache.engine import KVCache
from shared.model import Transformer, causal_attend, load_model

IDS = [5, 9, 2, 7, 7, 1, 3, 8, 6, 4, 0, 2]


@pytest.fixture(scope="module")
def model(tiny_checkpoint) -> Transformer:
    return load_model(tiny_checkpoint)


def new_cache(model: Transformer, rows: int = 1, max_len: int = 32) -> KVCache:
    return KVCache(model.config, rows, max_len, torch.float32, torch.device("cpu"))


def step(model: Transformer, cache: KVCache, new: dict[int, list[int]]) -> torch.Tensor:
    """Run the new tokens of each row; logits [T, V]."""
    positions = cache.begin({row: len(ids) for row, ids in new.items()})
    hidden = model(torch.tensor([i for ids in new.values() for i in ids]), positions, cache.attend)
    cache.commit()
    return model.logits(hidden)


def recomputed(model: Transformer, ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of the whole sequence with nothing kept: the oracle."""
    return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), causal_attend))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-4)  # the logits go up to some 50


def test_cached_logits_equal_recomputed_ones_at_every_step(model):
    cache, expected = new_cache(model), recomputed(model, IDS)
    close(step(model, cache, {0: IDS[:4]}), expected[:4])
    for i in range(4, len(IDS)):
        close(step(model, cache, {0: IDS[i : i + 1]}), expected[i : i + 1])


@pytest.mark.parametrize("chunk", [2, 3, 5])
def test_a_prompt_in_pieces_is_the_prompt_in_one(model, chunk: int):
    """A mask whose triangle begins at the upper left lets a later chunk see too little."""
    cache, expected = new_cache(model), recomputed(model, IDS)
    for start in range(0, len(IDS), chunk):
        close(step(model, cache, {0: IDS[start : start + chunk]}), expected[start : start + chunk])


def test_rows_of_different_lengths_do_not_see_each_other(model):
    """Packed prefill, then decode under a mask."""
    cache, prompts = new_cache(model, rows=3), {0: IDS[:2], 1: IDS[3:10], 2: IDS[5:9]}
    expected = torch.cat([recomputed(model, ids) for ids in prompts.values()])
    close(step(model, cache, prompts), expected)
    for token in (11, 12):
        for ids in prompts.values():
            ids.append(token)
        logits = step(model, cache, {row: [token] for row in prompts})
        close(logits, torch.stack([recomputed(model, ids)[-1] for ids in prompts.values()]))


def test_what_is_dropped_leaves_no_trace(model):
    """`keep` moves rows into the gaps; a row left behind would answer with another's keys."""
    cache = new_cache(model, rows=4)
    prompts = {0: IDS[:3], 1: IDS[2:9], 2: IDS[4:6], 3: IDS[1:7]}
    step(model, cache, prompts)
    cache.keep([1, 3])
    assert cache.lengths == [7, 6]
    logits = step(model, cache, {0: [10], 1: [10]})
    close(logits, torch.stack([recomputed(model, [*prompts[row], 10])[-1] for row in (1, 3)]))


def test_places_that_were_never_filled_do_not_count(model):
    """Whatever lies in them is multiplied by 0; NaN would come through."""
    cache = new_cache(model, rows=2, max_len=64)
    step(model, cache, {0: IDS[:2], 1: IDS[:9]})
    logits = step(model, cache, {0: [1], 1: [1]})
    assert torch.isfinite(logits).all()
    close(logits[0], recomputed(model, [*IDS[:2], 1])[-1])


def test_a_token_takes_as_many_bytes_as_the_formula_says(model):
    cache = new_cache(model, rows=2, max_len=10)
    per_token = KVCache.bytes_per_token(model.config, torch.float32)
    assert per_token == 2 * 2 * 2 * 8 * 4  # keys and values, 2 layers, 2 KV heads, 8 numbers of 4 bytes
    assert cache.keys.nbytes + cache.values.nbytes == 2 * 10 * per_token
