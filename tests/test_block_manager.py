"""The block manager against a simple model of it, and by hand: nobody ever reads somebody else's tokens."""

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ch10_paged_cache.block_manager import BlockManager, BlockTable, NoFreeBlocksError
from ch10_paged_cache.engine import PagedEngine
from shared.engine import SamplingParams
from tests.stepped import Arrival, new_engine, run, token_ids


class Cache:
    """A manager together with what a cache would hold: a token for each place of each block."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.places = [[None] * manager.block_size for _ in range(manager.num_blocks)]
        self.tables: list[tuple[BlockTable, list[int]]] = []  # with the tokens that each must hold

    def open(self, tokens: list[int]) -> bool:
        table = self.manager.open(tokens)
        assert table.num_cached == table.num_tokens < max(1, len(tokens))
        if not self.write(table, tokens[table.num_tokens :]):
            self.manager.free(table)
            return False
        self.tables.append((table, list(tokens)))
        return True

    def write(self, table: BlockTable, tokens: list[int]) -> bool:
        """What an engine does in a step. False, with nothing changed, if there is no room."""
        before, needed = copy.deepcopy(vars(self.manager)), self.manager.blocks_needed(table, len(tokens))
        snapshot = copy.deepcopy(table)
        free = self.manager.num_free
        try:
            copies = self.manager.grow(table, len(tokens))
        except NoFreeBlocksError:
            assert needed > free
            assert vars(self.manager) == before
            assert table == snapshot
            return False
        assert free - self.manager.num_free == needed - len(copies) + sum(
            1 for source, _ in copies if self.manager._references[source]
        )
        for source, target in copies:
            self.places[target] = list(self.places[source])
        for position, token in enumerate(tokens, start=table.num_tokens):
            self.places[table.blocks[position // self.manager.block_size]][position % self.manager.block_size] = token
        self.manager.commit(table, tokens)
        return True

    def check(self) -> None:
        m = self.manager
        m.check_integrity(table for table, _ in self.tables)
        assert len(m._free) + m.num_cached + m.num_used == m.num_blocks
        for table, tokens in self.tables:
            held = [self.places[table.blocks[i // m.block_size]][i % m.block_size] for i in range(table.num_tokens)]
            assert held == tokens, "a table reads other tokens than were written for it"


def random_operations(cache: Cache, rng: random.Random, count: int) -> None:
    for _ in range(count):
        action = rng.random()
        if action < 0.4 or not cache.tables:
            cache.open([rng.randint(0, 1) for _ in range(rng.randint(1, 14))])
        elif action < 0.7:
            table, tokens = rng.choice(cache.tables)
            new = [rng.randint(0, 1) for _ in range(rng.randint(1, 3))]
            if cache.write(table, new):
                tokens += new
        elif action < 0.8:
            table, tokens = rng.choice(cache.tables)
            cache.tables.append((cache.manager.fork(table), list(tokens)))
        else:
            table, _ = cache.tables.pop(rng.randrange(len(cache.tables)))
            cache.manager.free(table)
            cache.manager.free(table)  # more than once is no harm
        cache.check()


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_500_random_operations_keep_the_books_and_the_contents(block_size: int, prefix_caching: bool):
    cache = Cache(BlockManager(24, block_size, prefix_caching))
    random_operations(cache, random.Random(block_size), 500)
    while cache.tables:
        cache.manager.free(cache.tables.pop()[0])
    cache.check()
    assert cache.manager.num_free == 24


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), block_size=st.sampled_from([1, 2, 4]), blocks=st.integers(3, 20))
def test_any_operations_on_any_pool(seed: int, block_size: int, blocks: int):
    random_operations(Cache(BlockManager(blocks, block_size)), random.Random(seed), 60)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_colliding_hashes_find_nothing_wrong(block_size: int):
    """All contents under one key: what is found must be compared, tokens and parent."""
    cache = Cache(BlockManager(16, block_size, hash_block=lambda parent, tokens: 0))
    random_operations(cache, random.Random(7), 300)


def test_an_engine_with_colliding_hashes_gives_the_same_tokens(tiny_checkpoint):
    arrivals = [
        Arrival("abcdefgh" * n + "xyz"[:n], SamplingParams(max_tokens=9, ignore_eos=True), n) for n in range(1, 4)
    ] * 2
    results = []
    for collide in (False, True):
        engine = new_engine(tiny_checkpoint, PagedEngine, block_size=4, max_num_seqs=3)
        if collide:
            engine.blocks.hash_block = lambda parent, tokens: 0
        results.append([token_ids(deltas) for deltas in run(engine, arrivals)])
        assert engine.stats().prefix_cache_hit_tokens > 0
    assert results[0] == results[1]


@pytest.mark.parametrize("shared", range(1, 13))
def test_prefixes_around_a_block_boundary(shared: int):
    """Whole blocks are found; of a prompt that is known whole, the last token is left."""
    cache = Cache(BlockManager(16, 4))
    cache.open(list(range(12)))
    cache.open([*range(shared), 99])
    assert cache.tables[1][0].num_cached == shared // 4 * 4
    again = cache.manager.open(list(range(shared)))
    assert again.num_cached == (shared - 1) // 4 * 4
    cache.manager.free(again)
    cache.check()


def test_the_least_recently_used_is_evicted_first_and_of_one_table_the_tail():
    manager = BlockManager(4, 2)
    first, second = manager.open([]), manager.open([])
    for table, tokens in ((first, [1, 2, 3, 4]), (second, [5, 6])):
        manager.grow(table, len(tokens))
        manager.commit(table, tokens)
    manager.free(first)  # blocks of 1 2 and 3 4: the second of them goes first
    manager.free(second)
    other = manager.open([])
    manager.grow(other, 4)  # one free block, and one evicted
    manager.commit(other, [7, 8, 9, 10])
    assert manager.open([1, 2, 3, 4, 0]).num_cached == 2
    assert manager.open([5, 6, 0]).num_cached == 2


def test_a_block_that_was_evicted_does_not_vouch_for_its_children():
    """Children name their parent by identity: the same tokens after other ones must not be found."""
    manager = BlockManager(3, 1)
    table = manager.open([])
    manager.grow(table, 2)
    manager.commit(table, [1, 2])
    manager.free(table)
    manager.open([2, 0])  # 2 is known after 1 only
    other = manager.open([])
    manager.grow(other, 3)  # everything is evicted
    manager.commit(other, [3, 4, 5])
    assert manager.open([1, 2, 0]).num_cached == 0
    assert manager.open([3, 4, 0]).num_cached == 2


def test_a_copy_is_made_once_and_only_when_written():
    manager = BlockManager(6, 4)
    a = manager.open([])
    manager.grow(a, 6)
    manager.commit(a, [1, 2, 3, 4, 5, 6])
    b = manager.fork(a)
    assert manager.num_used == 2
    assert manager.blocks_needed(b, 1) == 1
    [(source, target)] = manager.grow(b, 1)
    assert (source, target) == (a.blocks[1], b.blocks[1])
    assert manager.grow(a, 1) == []  # now its own
    assert a.blocks[0] == b.blocks[0]


def test_without_prefix_caching_nothing_is_found_and_all_is_free_in_the_end():
    manager = BlockManager(4, 2, prefix_caching=False)
    table = manager.open([1, 2, 3])
    manager.grow(table, 3)
    manager.commit(table, [1, 2, 3])
    manager.free(table)
    assert manager.open([1, 2, 3]).num_cached == 0
    assert (manager.num_free, manager.num_cached, manager.num_used) == (4, 0, 0)
