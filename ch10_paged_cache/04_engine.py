"""Chapter 10's engine: chapter 9's, with the cache in blocks that are shared, handed out and taken back.

It replaces what paging changes, the cache, its scheduler and the plan of a step, and keeps the rest: threads, queues,
sampling, failures.

    scheduler: block tables, copies -> plan -> copy -> store and attend, once a layer, by block table -> logits
"""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from ch05_kv_cache.engine import KVCache
from ch09_async_scheduling.engine import AsyncConfig, AsyncEngine
from ch09_async_scheduling.plan import Plan, Request, StillWanted, run
from ch09_async_scheduling.scheduler import ScheduledSequence
from ch10_paged_cache.block_manager import BlockManager
from ch10_paged_cache.paged_attention import Batch, paged_attention, store
from ch10_paged_cache.paged_scheduler import BlockRoom, PagedScheduler, PagedSequence
from shared.engine import EngineStats, RequestError, SamplingParams, SetupError, TokenIds
from shared.machine import free_memory, zeros
from shared.model import ModelConfig

SHARE = 0.5  # of the free memory for the pool, unless NUM_BLOCKS says otherwise


class PagedConfig(AsyncConfig):
    block_size: int = Field(default=16, ge=1, description="tokens in a block")
    num_blocks: int | None = Field(default=None, ge=1, description="blocks of the pool; default: from the free memory")
    prefix_caching: bool = Field(default=True, description="find prompts' beginnings in the cache")


@dataclass
class PagedPlan(Plan):
    """A pass whose sequences' tokens lie in blocks."""

    tables: list[list[int]]  # [S], the blocks of each
    copies: list[tuple[int, int]]  # (source, target) blocks, to be made first


class PagedCache:
    """Keys and values of all tokens in a pool of N blocks: [L, N, KV, block_size, D] each."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self.keys, self.values = zeros(shape, dtype, device), zeros(shape, dtype, device)
        self.block_size = block_size

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, one pair after the other: a target may be a later one's source."""
        for source, target in pairs:
            self.keys[:, target], self.values[:, target] = self.keys[:, source], self.values[:, source]

    def begin(self, plan: PagedPlan) -> None:
        self.copy(plan.copies)
        self._batch = Batch.build(plan.tables, plan.starts, plan.counts, self.block_size, self.keys.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [T, KV, D] of the new tokens and answer q [T, H, D] from all that is stored: [T, H, D]."""
        store(self.keys[layer], self.values[layer], k, v, self._batch)
        return paged_attention(q, self.keys[layer], self.values[layer], self._batch)


class PagedEngine(AsyncEngine):
    """Continuous batching over blocks, with prefix caching and preemption.

    Raises SetupError, one line, if the model, a setting or the pool's size can't be used.
    """

    config_class = PagedConfig
    sequence_class = PagedSequence
    config: PagedConfig
    scheduler: PagedScheduler

    def make_scheduler(self) -> PagedScheduler:
        c = self.config
        num_blocks = self.pool_size()
        self.cache = self.make_cache(num_blocks)
        self.blocks = BlockManager(num_blocks, c.block_size, c.prefix_caching)
        return PagedScheduler(BlockRoom(self.blocks), c.max_num_seqs, c.max_num_batched_tokens)

    def make_cache(self, num_blocks: int) -> PagedCache:
        c = self.config
        return PagedCache(self.model.config, num_blocks, c.block_size, c.torch_dtype(), self.device)

    def bytes_per_block(self) -> int:
        return self.config.block_size * KVCache.bytes_per_token(self.model.config, self.config.torch_dtype())

    def pool_size(self) -> int:
        """Blocks of the pool: what half of the free memory holds, and no more than all sequences at their longest.

        Raises SetupError, with the numbers, if NUM_BLOCKS don't fit, or the memory holds not even one.
        """
        c, free, each = self.config, free_memory(self.device), self.bytes_per_block()
        if c.num_blocks is None:
            longest = -(-self.max_model_len // c.block_size)
            blocks = min(c.max_num_seqs * longest, int(SHARE * free) // each)
            if blocks < 1:
                raise SetupError(f"BLOCK_SIZE={c.block_size}: a block takes {each:,} bytes, and {free:,} are free.")
            return blocks
        if c.num_blocks * each > free:
            raise SetupError(
                f"NUM_BLOCKS={c.num_blocks} blocks of {c.block_size} tokens take {c.num_blocks * each / 1e9:.1f} GB, "
                f"and {free / 1e9:.1f} GB are free. Set NUM_BLOCKS to at most {free // each} or unset it."
            )
        return c.num_blocks

    def check_request(self, token_ids: TokenIds, params: SamplingParams) -> None:
        """As the contract says, and refuse what the whole pool couldn't hold."""
        super().check_request(token_ids, params)
        # The last token of an answer is never put into the cache: nothing comes after it.
        tokens = min(len(token_ids) + max(params.max_tokens - 1, 0), self.max_model_len)
        needed, total = -(-tokens // self.config.block_size), self.blocks.num_blocks
        if needed > total:
            raise RequestError(
                f"the request may take {tokens} tokens of cache, {needed} blocks of {self.config.block_size}, and the "
                f"pool has {total}: shorten the prompt ({len(token_ids)} tokens) or lower max_tokens "
                f"({params.max_tokens})",
                param="max_tokens",
            )

    def to_prefill(self, request: Request) -> list[ScheduledSequence]:
        """One choice computes the prompt; the others start from its blocks."""
        return request.sequences[:1]

    def branch(self, sampled: list[tuple[ScheduledSequence, int]]) -> list[tuple[ScheduledSequence, int]]:
        """All choices are sampled from the logits that the first one got for the prompt."""
        branched = list(sampled)
        for seq, row in sampled:
            if seq.index == 0 and not seq.output_ids:
                for other in seq.owner.sequences[1:]:
                    if self.scheduler.branch(seq, other):
                        branched.append((other, row))
        return branched

    def order(self, step: list[tuple[ScheduledSequence, int]]) -> list[tuple[ScheduledSequence, int]]:
        return step

    def plan(self, step: list[tuple[ScheduledSequence, int]], rows: list[int]) -> PagedPlan:
        copies, self.scheduler.room.copies = self.scheduler.room.copies, []
        return PagedPlan(
            token_ids=[token for seq, count in step for token in seq.tokens(seq.computed, count)],
            starts=[seq.computed for seq, _ in step],
            counts=[count for _, count in step],
            rows=rows,
            tables=[seq.table.blocks for seq, _ in step if isinstance(seq, PagedSequence) and seq.table],
            copies=copies,
        )

    def forward(self, plan: Plan, still_wanted: StillWanted) -> Tensor:
        assert isinstance(plan, PagedPlan)
        self.cache.begin(plan)
        return run(self.model, plan, self.cache.attend, still_wanted)

    def memory(self) -> tuple[int, int]:
        return self.blocks.num_used, self.blocks.num_blocks

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=self.waiting,
            kv_blocks_used=self.blocks.num_used,
            kv_blocks_total=self.blocks.num_blocks,
            prefix_cache_hit_tokens=self.scheduler.room.hit_tokens,
            preemptions=self.scheduler.preemptions,
        )
