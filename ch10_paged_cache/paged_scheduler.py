"""Scheduling when memory is handed out in blocks: who fits is admitted, and who must give way is computed again later.

It knows sequences, block tables and the block manager. It knows no tensor.

    waiting -> enough blocks? -> running -> a block more when a token needs one -> none left? -> preempt the latest

Preemption by recomputation: PagedAttention (arXiv:2309.06180), section 4.5.
"""

from dataclasses import replace

from ch09_async_scheduling.scheduler import ScheduledSequence, Scheduler
from ch10_paged_cache.block_manager import BlockManager, BlockTable, NoFreeBlocksError
from shared.engine import RequestMetrics


class PagedSequence(ScheduledSequence):
    """A sequence whose place in the cache is a block table, while it runs."""

    table: BlockTable | None = None
    cached_tokens: int | None = None  # of the prompt, found in the cache when it was first admitted

    def metrics(self) -> RequestMetrics:
        return replace(super().metrics(), cached_tokens=self.cached_tokens)


class BlockRoom:
    """The block manager as the scheduler sees it: what a sequence takes, shares and gives back."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.copies: list[tuple[int, int]] = []  # (source, target): to be made before the next pass writes
        self.hit_tokens = 0
        self.num_running = 0

    def admit(self, seq: ScheduledSequence) -> bool:
        """Give it blocks for all that it has to compute, less what the cache holds already.

        Each running sequence may need a block soon. Those are left free, or whoever comes in would be thrown out again.
        """
        assert isinstance(seq, PagedSequence)
        # A prompt that is scored needs the logits of all its tokens, so all of them are computed.
        table = self.manager.open([] if seq.scores_prompt else seq.token_ids)
        if self.manager.blocks_needed(table, len(seq) - table.num_cached) + self.num_running > self.manager.num_free:
            self.manager.free(table)
            return False
        self.copies += self.manager.grow(table, len(seq) - table.num_cached)
        seq.table, seq.computed = table, table.num_cached
        self.hit_tokens += table.num_cached
        if seq.cached_tokens is None and self.manager.prefix_caching:
            seq.cached_tokens = table.num_cached
        self.num_running += 1
        return True

    def grow(self, seq: PagedSequence, count: int) -> bool:
        """Make room for `count` more tokens, or return False and change nothing."""
        assert seq.table is not None
        try:
            self.copies += self.manager.grow(seq.table, count)
        except NoFreeBlocksError:
            return False
        return True

    def fork(self, seq: PagedSequence, other: PagedSequence) -> None:
        """Let `other` share all that `seq` has. Whoever writes into a shared block first gets a copy of it."""
        assert seq.table is not None
        other.table, other.computed = self.manager.fork(seq.table), seq.computed
        other.cached_tokens, other.prompt_logprobs = seq.cached_tokens, seq.prompt_logprobs
        self.num_running += 1

    def release(self, seq: ScheduledSequence) -> None:
        assert isinstance(seq, PagedSequence)
        if seq.table is not None:
            self.manager.free(seq.table)
            seq.table = None
            self.num_running -= 1


class PagedScheduler(Scheduler):
    """Chapter 9's policy, with memory that may run out in the middle of a sequence."""

    room: BlockRoom

    def __init__(self, room: BlockRoom, max_num_seqs: int, token_budget: int) -> None:
        super().__init__(room, max_num_seqs, token_budget)
        self.preemptions = 0

    def schedule(self) -> list[tuple[ScheduledSequence, int]]:
        budget, chosen = self.token_budget, {}
        preemptions = self.preemptions
        for seq in [*self.decoding(), *self.prefilling()]:
            count = min(seq.left, budget)
            if count and self.make_room(seq, count):
                chosen[seq] = count
                budget -= count
        step = [(seq, count) for seq, count in chosen.items() if seq in self.running]  # the others were preempted
        while self.preemptions == preemptions and budget and self.waiting and len(self.running) < self.max_num_seqs:
            seq = next(iter(self.waiting))
            if not self.admit(seq):
                break  # nobody overtakes it
            count = min(seq.left, budget)
            step.append((seq, count))
            budget -= count
        return step

    def make_room(self, seq: ScheduledSequence, count: int) -> bool:
        """Room for `count` tokens of a running sequence, taken from those that came last; False if it was one of them.

        The first of all can always go on: with everybody else gone, the whole pool is its own, and what could never
        fit was refused at submission.
        """
        assert isinstance(seq, PagedSequence)
        while seq in self.running:
            if self.room.grow(seq, count):
                return True
            self.preempt(next(reversed(self.running)))
        return False

    def preempt(self, seq: ScheduledSequence) -> None:
        """Take its blocks and put it back to the head of the queue. Its tokens stay, and are computed again later."""
        del self.running[seq]
        self.room.release(seq)
        seq.computed, seq.scored = 0, []
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)
        self.preemptions += 1

    def branch(self, seq: PagedSequence, other: PagedSequence) -> bool:
        """Start another choice from the prompt that `seq` has just computed.

        False if no more sequences may run: then it waits its turn and finds the prompt in the cache.
        """
        if len(self.running) == self.max_num_seqs:
            self.waiting[other] = None
            self.waiting.move_to_end(other, last=False)
            return False
        self.room.fork(seq, other)
        self.running[other] = None
        return True

    def advance(self, seq: ScheduledSequence, count: int) -> None:
        assert isinstance(seq, PagedSequence)
        assert seq.table is not None
        self.room.manager.commit(seq.table, seq.tokens(seq.computed, count))
        super().advance(seq, count)

    def check_places(self) -> None:
        running = [seq for seq in self.running if isinstance(seq, PagedSequence)]
        tables = [seq.table for seq in running if seq.table is not None]
        assert len(tables) == len(self.running) == self.room.num_running, "a running sequence has no block table"
        assert all(seq.table is None for seq in self.waiting if isinstance(seq, PagedSequence)), "who waits has blocks"
        for seq in running:
            assert seq.table is not None
            assert seq.table.num_tokens == seq.computed, "the table and the sequence count differently"
        self.room.manager.check_integrity(tables)
