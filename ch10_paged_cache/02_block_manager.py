"""The block manager step by step: allocate, append, share, copy on write, free, evict. Check each table by hand.

python 02_block_manager.py: six blocks of four tokens -> what each table and each block holds after every step
"""

from ch10_paged_cache.block_manager import BlockManager, BlockTable, NoFreeBlocksError

manager = BlockManager(num_blocks=6, block_size=4)
stored: dict[int, list[int]] = {block: [] for block in range(6)}  # what a cache would hold
tables: dict[str, BlockTable] = {}


def write(name: str, tokens: list[int]) -> None:
    """Make room, copy what must be copied, store, commit: what an engine does in a step."""
    table = tables[name]
    for source, target in manager.grow(table, len(tokens)):
        print(f"   copy block {source} to block {target}, for it is shared and about to be written")
        stored[target] = list(stored[source])
    for position, token in enumerate(tokens, start=table.num_tokens):
        block = table.blocks[position // 4]
        stored[block] = [*stored[block][: position % 4], token]
    manager.commit(table, tokens)


def show(what: str) -> None:
    print(f"\n{what}")
    for name, table in tables.items():
        print(f"   {name}: blocks {table.blocks}, {table.num_tokens} tokens")
    users = [sum(block in table.blocks for table in tables.values()) for block in range(6)]
    print("   block     " + "".join(f"{block:>16}" for block in range(6)))
    print("   tokens    " + "".join(f"{' '.join(map(str, stored[block])) or '-':>16}" for block in range(6)))
    print("   in tables " + "".join(f"{count:>16}" for count in users))
    print(f"   free or evictable {manager.num_free} (of them cached {manager.num_cached}), in use {manager.num_used}")
    manager.check_integrity(tables.values())


def main() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    print("Predict each table before you read it. Tokens are numbers; a block holds four.")

    tables["A"] = manager.open(prompt)
    write("A", prompt)
    show("1. Allocate: A's prompt of nine tokens takes three blocks, the last with one token in it.")

    write("A", [10])
    show("2. Append: the tenth token goes into the third block. Nothing is allocated.")

    tables["B"] = manager.open([1, 2, 3, 4, 5, 6, 7, 8, 99])
    print(f"\n   B's prompt begins with A's: {tables['B'].num_cached} of its 9 tokens are in the cache already.")
    write("B", [99])
    show("3. Share: B has A's first two blocks and one of its own.")

    tables["C"] = manager.fork(tables["A"])
    show("4. Fork: C is another answer to A's prompt (n=2). All of A's blocks are shared, the third as well.")

    write("C", [77])
    show("5. Copy on write: C's next token would go into the third block, which A still needs as it is.")

    manager.free(tables.pop("A"))
    manager.free(tables.pop("C"))
    show("6. Free: what only A and C had is given back. Blocks that B shares stay in use.")

    manager.free(tables.pop("B"))
    show("7. The two full blocks are in no table now. They stay findable until somebody needs the room: cached.")

    tables["D"] = manager.open([1, 2, 3, 4, 50])
    print(f"\n   D finds {tables['D'].num_cached} tokens.")
    write("D", [50, *range(51, 70)])
    show("8. Evict: D needs five more blocks, and four are free. Then, the least recently used cached one is taken.")

    try:
        manager.grow(tables["D"], 1)
    except NoFreeBlocksError as error:
        print(f"\n9. No room: {error}. Nothing has changed. An engine preempts somebody now.")
    manager.check_integrity(tables.values())


if __name__ == "__main__":
    main()
