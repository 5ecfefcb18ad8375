"""Who has which block of the cache: tables, reference counts, and full blocks that can be found again by their tokens.

It knows numbers of blocks and tokens. It knows no tensor, no sequence and no scheduler.

    open (find a prefix) -> grow (take blocks) -> commit (tokens are stored) -> ... -> free

A block is in exactly one of three states:

    free      nobody has it and nothing is known of its contents
    cached    nobody has it, but its tokens are known: found again, or evicted, the least recently used first
    in use    in one table or in several

PagedAttention (arXiv:2309.06180), sections 4.2 to 4.4.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field


class NoFreeBlocksError(Exception):
    """There aren't as many blocks as are needed now."""


@dataclass
class BlockTable:
    """A sequence's blocks, in order. The first `num_tokens` places of them are filled.

    block_size 4:   blocks [ 7,           2,           9          ]
                    places  0  1  2  3 |  4  5  6  7 |  8  9  .  .       num_tokens 10
    """

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0  # tokens that were found when the table was opened
    tail: list[int] = field(default_factory=list)  # tokens in the last block while it isn't full
    parent: int = 0  # the identity of the last full block's contents; 0 before the first


@dataclass(frozen=True)
class _Content:
    """What a full block holds: these tokens after those of the parent.

    `identity` is never given twice. Children name their parent by it and not by its block, so when a block is evicted
    and gets other contents, the children of the old ones can't be taken for children of the new.
    """

    identity: int
    parent: int
    tokens: tuple[int, ...]
    block: int


def hash_block(parent: int, tokens: tuple[int, ...]) -> Hashable:
    """The key under which a block's contents are looked up. What is found is compared, so any function will do."""
    return hash((parent, tokens))


class BlockManager:
    """Hands out `num_blocks` blocks of `block_size` tokens. Each operation costs the blocks that it touches."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        hash_block: Callable[[int, tuple[int, ...]], Hashable] = hash_block,
    ) -> None:
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self.hash_block = hash_block
        self._free = list(range(num_blocks))[::-1]  # a stack: what was given back last is taken first
        self._references = [0] * num_blocks
        self._known: dict[Hashable, list[_Content]] = {}
        self._content: dict[int, _Content] = {}  # of blocks whose contents are known
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached blocks, the least recently used first
        self._next_identity = 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now: the free ones, and the cached ones, which would be evicted."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def open(self, token_ids: Sequence[int]) -> BlockTable:
        """A new table that shares the known blocks with which `token_ids` begin.

        At least the last token is left to be computed, for the next one is sampled from its logits.
        """
        table = BlockTable()
        if not self.prefix_caching:
            return table
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            content = self._find(table.parent, tuple(token_ids[start : start + self.block_size]))
            if content is None:
                break
            self._take(content.block)
            table.blocks.append(content.block)
            table.parent = content.identity
        table.num_tokens = table.num_cached = len(table.blocks) * self.block_size
        return table

    def blocks_needed(self, table: BlockTable, new_tokens: int) -> int:
        """Blocks that `grow` would take."""
        total = -(-(table.num_tokens + new_tokens) // self.block_size)
        return max(0, total - len(table.blocks)) + (new_tokens > 0 and self._writes_into_shared(table))

    def grow(self, table: BlockTable, new_tokens: int) -> list[tuple[int, int]]:
        """Make room for `new_tokens` more tokens.

        Returns (source, target) blocks that must be copied before anything is written: a shared block that isn't full
        is replaced by a copy. Raises NoFreeBlocksError, and changes nothing, if there are too few blocks.
        """
        needed = self.blocks_needed(table, new_tokens)
        if needed > self.num_free:
            raise NoFreeBlocksError(f"{needed} blocks are needed and {self.num_free} are free")
        copies = []
        if new_tokens > 0 and self._writes_into_shared(table):
            last = table.num_tokens // self.block_size
            source, target = table.blocks[last], self._allocate()
            self._give_back(source)
            table.blocks[last] = target
            copies.append((source, target))
            needed -= 1
        table.blocks += [self._allocate() for _ in range(needed)]
        return copies

    def commit(self, table: BlockTable, token_ids: Sequence[int]) -> None:
        """These tokens have been stored in the table's next places. Blocks that they fill can be found from now on."""
        assert table.num_tokens + len(token_ids) <= len(table.blocks) * self.block_size, "more tokens than places"
        table.num_tokens += len(token_ids)
        if not self.prefix_caching:
            return
        table.tail += token_ids
        while len(table.tail) >= self.block_size:
            tokens, table.tail = tuple(table.tail[: self.block_size]), table.tail[self.block_size :]
            block = table.blocks[(table.num_tokens - len(table.tail)) // self.block_size - 1]
            content = self._find(table.parent, tokens)
            if content is None:
                content = _Content(self._next_identity, table.parent, tokens, block)
                self._next_identity += 1
                self._known.setdefault(self.hash_block(table.parent, tokens), []).append(content)
                self._content[block] = content
            table.parent = content.identity  # an equal block that is known already stays the one that is found

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table of the same tokens in the same blocks."""
        for block in table.blocks:
            self._references[block] += 1
        return BlockTable(list(table.blocks), table.num_tokens, table.num_cached, list(table.tail), table.parent)

    def free(self, table: BlockTable) -> None:
        """Give all blocks back; the table is empty then. The last block first, so that beginnings stay the longest."""
        for block in reversed(table.blocks):
            self._give_back(block)
        table.blocks, table.num_tokens, table.tail, table.parent = [], 0, [], 0

    def _writes_into_shared(self, table: BlockTable) -> bool:
        last, filled = divmod(table.num_tokens, self.block_size)
        return filled > 0 and self._references[table.blocks[last]] > 1

    def _find(self, parent: int, tokens: tuple[int, ...]) -> _Content | None:
        for content in self._known.get(self.hash_block(parent, tokens), ()):
            if content.parent == parent and content.tokens == tokens:  # equal hashes prove nothing
                return content
        return None

    def _take(self, block: int) -> None:
        self._references[block] += 1
        self._evictable.pop(block, None)

    def _give_back(self, block: int) -> None:
        self._references[block] -= 1
        assert self._references[block] >= 0, f"block {block} was given back more often than it was taken"
        if self._references[block] == 0:
            if block in self._content:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def _allocate(self) -> int:
        """A block for new contents: a free one, or else the least recently used of the cached ones."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            content = self._content.pop(block)
            key = self.hash_block(content.parent, content.tokens)
            self._known[key].remove(content)
            if not self._known[key]:
                del self._known[key]
        self._references[block] = 1
        return block

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Raise AssertionError if the books disagree with each other or with these tables, all that there are."""
        tables = list(tables)
        counted = Counter(block for table in tables for block in table.blocks)
        for block, references in enumerate(self._references):
            assert references == counted[block], f"block {block}: {references} references, in {counted[block]} tables"
        used = {block for block, references in enumerate(self._references) if references}
        states = [*self._free, *self._evictable, *used]
        assert sorted(states) == list(range(self.num_blocks)), "a block is in two states, or in none"
        assert self.num_free + self.num_used == self.num_blocks
        assert self._evictable.keys() <= self._content.keys(), "a cached block has no known contents"
        assert not self._content.keys() & set(self._free), "a free block can be found"
        found = [content for contents in self._known.values() for content in contents]
        assert sorted(c.identity for c in found) == sorted(c.identity for c in self._content.values()), "lost contents"
        assert all(self._content[content.block] == content for content in found), "contents lie in another block"
        for table in tables:
            assert table.num_tokens <= len(table.blocks) * self.block_size, "a table has more tokens than places"
            assert not self.prefix_caching or len(table.tail) == table.num_tokens % self.block_size, "a lost token"
