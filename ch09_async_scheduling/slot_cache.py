"""The cache of a batch that changes at every step: a slot for each running sequence, as long as the longest may become.

It knows slots, positions and attention. It doesn't know who the sequences are, and it keeps no count of their tokens.

    plan (slots, starts, counts) -> begin -> attend, once a layer -> [T, H, D]
"""

import heapq

import torch
from torch import Tensor

from ch05_kv_cache.engine import KVCache
from ch09_async_scheduling.scheduler import ScheduledSequence
from shared.errors import SetupError
from shared.machine import free_memory
from shared.model import ModelConfig

SHARE = 0.8  # of the free memory, so that activations and the rest of the machine have some


class SlotCache(KVCache):
    """Chapter 5's tensors [L, slots, KV, S, D], whose rows are handed out and taken back.

    Raises SetupError, with the numbers, if they don't fit the memory.
    """

    def __init__(self, config: ModelConfig, slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        needed, free = slots * max_len * self.bytes_per_token(config, dtype), free_memory(device)
        if needed > SHARE * free:
            raise SetupError(
                f"MAX_NUM_SEQS={slots} slots of MAX_MODEL_LEN={max_len} tokens take {needed / 1e9:.1f} GB "
                f"({self.bytes_per_token(config, dtype):,} bytes a token), and {SHARE:.0%} of the free memory is "
                f"{SHARE * free / 1e9:.1f} GB. Lower MAX_NUM_SEQS or MAX_MODEL_LEN."
            )
        super().__init__(config, slots, max_len, dtype, device)
        self._free = list(range(slots))  # a heap: the lowest slot first keeps the slots in use together
        self.num_slots = slots

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def admit(self, seq: ScheduledSequence) -> bool:
        if not self._free:
            return False
        seq.slot = heapq.heappop(self._free)
        return True

    def release(self, seq: ScheduledSequence) -> None:
        if seq.slot is not None:
            heapq.heappush(self._free, seq.slot)
            seq.slot = None

    def begin_step(self, slots: list[int], starts: list[int], counts: list[int]) -> None:
        """Say what the next pass holds, packed in this order: sequences with one new token, by slot, then the others.

        starts: tokens that each has stored; counts: new ones.
        """
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        n = self._singles = sum(count == 1 for count in counts)
        self._rows, self._new, self._ends = slots[n:], counts[n:], ends[n:]
        if n:
            self._plan_singles(slots[:n], ends[:n])

    def _plan_singles(self, slots: list[int], ends: list[int]) -> None:
        """All sequences with one new token are answered in one product over the slots from the first to the last.

        A slot between them may be free or in prefill: a hole, whose row is computed and dropped.
        """
        low, high = slots[0], slots[-1] + 1
        self._slots, self._span, self._longest = torch.tensor(slots), slice(low, high), max(ends)
        lengths = torch.ones(high - low, dtype=torch.long)
        self._holes = len(slots) < high - low
        self._inside = self._slots - low
        lengths[self._inside] = torch.tensor(ends)
        self._places = torch.tensor(ends) - 1
        beyond = torch.arange(self._longest) >= lengths[:, None]  # [span, longest]
        mask = torch.zeros(beyond.shape, dtype=self.keys.dtype).masked_fill_(beyond, -torch.inf)
        self._mask = mask[:, None, None].to(self.keys.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [T, KV, D] of the new tokens and answer q [T, H, D] from all that is stored: [T, H, D]."""
        n = self._singles
        if n == 0:
            return self._prefill(layer, q, k, v)
        singles = self._decode(layer, q[:n], k[:n], v[:n])
        if n == len(q):
            return singles
        return torch.cat((singles, self._prefill(layer, q[n:], k[n:], v[n:])))

    def _decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _, H, D = q.shape
        KV, S = k.shape[1], self._longest
        self.keys[layer, self._slots, :, self._places], self.values[layer, self._slots, :, self._places] = k, v
        keys, values = self.keys[layer, self._span, :, :S], self.values[layer, self._span, :, :S]  # [span, KV, S, D]
        if self._holes:
            q = q.new_zeros(len(keys), H, D).index_copy_(0, self._inside, q)
        scores = torch.matmul(q.reshape(-1, KV, H // KV, D) * D**-0.5, keys.transpose(2, 3)) + self._mask
        out = torch.matmul(scores.softmax(dim=-1), values).view(-1, H, D)
        return out[self._inside] if self._holes else out
