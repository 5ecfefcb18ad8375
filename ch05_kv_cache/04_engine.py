"""Chapter 5's engine: the keys and values of every token are kept, so each token goes through the model once.

A request has two phases. Prefill runs all prompt tokens in one pass and fills the cache; decode runs one token a pass
and reads it. It is still blocking: one call at a time, but a call may be a batch. It knows no scheduler and no HTTP.

    prompts -> prefill, packed -> logits [B, V] -> sample -> B tokens -> decode, one row each -> logits [B, V] -> ...
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from shared.blocking import OneAtATime, interruptible
from shared.checkpoint import checkpoint_folder, model_id
from shared.config import EngineConfig
from shared.engine import BaseOfflineEngine, Delta, GenerateResult, RequestMetrics, SamplingParams, TokenIds
from shared.machine import zeros
from shared.model import ModelConfig, load_model
from shared.sampler import sample, token_logprobs
from shared.sequence import Sequence as GeneratedSequence
from shared.tokenizer import Tokenizer

PREFILL_TOKENS = 2048  # prompts are packed up to this many tokens a pass, so that a pass has a bounded size


class KVCacheConfig(EngineConfig):
    max_num_seqs: int = Field(default=16, ge=1, description="sequences that run in one batch")


class KVCache:
    """Keys and values of B sequences in one preallocated tensor each, contiguous: [L, B, KV, S, D].

    A row is a sequence; its first `lengths[row]` places are filled. Rows are dense: `keep` closes the gaps.

        keys[layer, row]:   0          lengths[row]             S
                            | filled   | free                   |
    """

    def __init__(self, config: ModelConfig, rows: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_layers, rows, config.num_kv_heads, max_len, config.head_dim)
        # Zeros, for whatever stands in a free place is multiplied by 0 in the end, and NaN times 0 is NaN.
        self.keys, self.values = zeros(shape, dtype, device), zeros(shape, dtype, device)
        self.lengths = [0] * rows
        self._new: list[int] = []
        self._mask: Tensor | None = None

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """A key and a value for each KV head in each layer."""
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize

    def begin(self, new: dict[int, int]) -> Tensor:
        """Say which rows get how many tokens in the next pass, packed in this order. Returns their positions [T]."""
        self._rows, self._new = list(new), list(new.values())
        starts = [self.lengths[row] for row in new]
        self._ends = [start + count for start, count in zip(starts, self._new, strict=True)]
        # One new token for each of rows 0, 1, 2, ...: then all rows are answered together.
        self._decoding = self._rows == list(range(len(self._rows))) and set(self._new) == {1}
        self._mask = self._decode_mask() if self._decoding else None
        return torch.cat([torch.arange(s, e) for s, e in zip(starts, self._ends, strict=True)]).to(self.keys.device)

    def commit(self) -> None:
        """The pass is done: what it stored counts."""
        for row, end in zip(self._rows, self._ends, strict=True):
            self.lengths[row] = end

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [T, KV, D] of the new tokens and answer q [T, H, D] from all that is stored: [T, H, D]."""
        return self._decode(layer, q, k, v) if self._decoding else self._prefill(layer, q, k, v)

    def _prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Several tokens a sequence: each sequence by itself, causally."""
        out, start = torch.empty_like(q), 0
        for row, count, end in zip(self._rows, self._new, self._ends, strict=True):
            new = slice(start, start + count)
            keys, values = self.keys[layer, row, :, :end], self.values[layer, row, :, :end]  # [KV, end, D]
            keys[:, end - count :], values[:, end - count :] = k[new].transpose(0, 1), v[new].transpose(0, 1)
            # With tokens before these, query i sees those and the first i new ones: a triangle set to the lower right.
            mask = None if count == end else torch.ones(count, end, dtype=torch.bool, device=q.device).tril(end - count)
            heads = F.scaled_dot_product_attention(  # [1, H, count, D]
                q[new].transpose(0, 1)[None], keys[None], values[None], mask, is_causal=mask is None, enable_gqa=True
            )
            out[new] = heads[0].transpose(0, 1)
            start += count
        return out

    def _decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One token a sequence, all sequences in one product. Query heads that share a KV head are its rows."""
        B, H, D = q.shape
        KV, S = k.shape[1], max(self._ends)
        if self._mask is None:  # all rows are equally long
            self.keys[layer, :B, :, S - 1], self.values[layer, :B, :, S - 1] = k, v
        else:
            rows, places = self._places
            self.keys[layer, rows, :, places], self.values[layer, rows, :, places] = k, v
        keys, values = self.keys[layer, :B, :, :S], self.values[layer, :B, :, :S]  # [B, KV, S, D], views
        if B == 1:  # the fused kernel is the faster one for a single sequence, and the slower one for several
            return F.scaled_dot_product_attention(q.view(B, KV, H // KV, D), keys, values).view(B, H, D)
        scores = torch.matmul(q.view(B, KV, H // KV, D) * D**-0.5, keys.transpose(2, 3))  # [B, KV, H/KV, S]
        if self._mask is not None:
            scores += self._mask
        return torch.matmul(scores.softmax(dim=-1), values).view(B, H, D)

    def _decode_mask(self) -> Tensor | None:
        """[B, 1, 1, S]: minus infinity on the places that a shorter row doesn't have; None if all are equally long."""
        if len(set(self._ends)) == 1:
            return None
        ends = torch.tensor(self._ends, device=self.keys.device)
        self._places = torch.arange(len(self._ends), device=ends.device), ends - 1
        free = torch.arange(max(self._ends), device=ends.device) >= ends[:, None]  # [B, S]
        return torch.zeros(free.shape, dtype=self.keys.dtype, device=ends.device).masked_fill_(free, -torch.inf)[
            :, None, None
        ]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, ascending; they become rows 0, 1, 2, ..."""
        for target, row in enumerate(rows):
            if target != row:
                n = self.lengths[row]
                self.keys[:, target, :, :n] = self.keys[:, row, :, :n]
                self.values[:, target, :, :n] = self.values[:, row, :, :n]
        self.lengths = [self.lengths[row] for row in rows]


class TimedSequence(GeneratedSequence):
    """A sequence that also knows when its first token came."""

    def metrics(self) -> RequestMetrics:
        metrics, now = super().metrics(), time.perf_counter()
        if self.first_token_at is None:
            return metrics
        after_first = len(self.output_ids) - 1
        return replace(
            metrics,
            ttft_ms=round((self.first_token_at - self.started_at) * 1e3, 3),
            tpot_ms=round((now - self.first_token_at) * 1e3 / after_first, 3) if after_first else None,
        )


class KVCacheEngine(BaseOfflineEngine):
    """Blocking, with a cache that lives as long as the call. The whole conversation goes into the prompt.

    Raises SetupError, one line, if the model or a setting can't be used.
    """

    def __init__(self, config: KVCacheConfig | None = None) -> None:
        self.config = config = config or KVCacheConfig()
        folder = checkpoint_folder(config.model)
        self.model_id = model_id(config.model)
        self.tokenizer = Tokenizer(folder)
        self.model = load_model(folder, config.torch_dtype(), config.torch_device())
        self.max_model_len = config.context_length(self.model.max_model_len)
        self._one_at_a_time = OneAtATime()
        config.announce(self.max_model_len)

    def stream(
        self,
        prompt: str | TokenIds,
        max_new_tokens: int | None = None,
        params: SamplingParams | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Delta]:
        with self._one_at_a_time, interruptible(self.model, cancel):
            seq = TimedSequence.for_request(self, prompt, max_new_tokens, params)
            for _, delta in self.run([seq]):
                yield delta

    def generate_batch(
        self, prompts: Sequence[str | TokenIds], params: SamplingParams | None = None
    ) -> list[GenerateResult]:
        """As the contract says, `max_num_seqs` choices at a time: a static batch, which ends with its longest."""
        requests = self.choices(prompts, params or SamplingParams())
        results: list[GenerateResult] = []
        with self._one_at_a_time:
            for start in range(0, len(requests), self.config.max_num_seqs):
                batch: list[GeneratedSequence] = [
                    TimedSequence(token_ids, p, self.tokenizer, self.max_model_len)
                    for token_ids, p in requests[start : start + self.config.max_num_seqs]
                ]
                deltas: dict[int, list[Delta]] = {id(seq): [] for seq in batch}
                for seq, delta in self.run(batch):
                    deltas[id(seq)].append(delta)
                results += [GenerateResult.from_deltas(deltas[id(seq)]) for seq in batch]
        return results

    def run(self, batch: list[GeneratedSequence]) -> Iterator[tuple[GeneratedSequence, Delta]]:
        """Generate all sequences of the batch together, a (sequence, Delta) a token, until the last has finished."""
        max_len = max(len(seq.prompt_ids) + seq.max_tokens for seq in batch)
        weights = next(self.model.parameters())
        cache = KVCache(self.model.config, len(batch), max_len, weights.dtype, weights.device)
        live = batch
        logits: Tensor | None = self.prefill(batch, cache)  # [B, V]; None once a token was drawn from them
        for seq in live:
            if seq.max_tokens == 0:
                yield seq, seq.finish_without_output()
        while still := [row for row, seq in enumerate(live) if not seq.finished]:
            if len(still) < len(live):  # those that have finished leave the batch
                cache.keep(still)
                live, logits = [live[row] for row in still], None if logits is None else logits[still]
            if logits is None:
                logits = self.decode(live, cache)
            for seq, (token_id, logprob) in zip(live, sample(logits, live), strict=True):
                yield seq, seq.append(token_id, logprob)
            logits = None

    def prefill(self, batch: list[GeneratedSequence], cache: KVCache) -> Tensor:
        """Run all prompts, packed, and return the logits [B, V] after each."""
        last_hidden = []
        for rows in pack([len(seq.prompt_ids) for seq in batch]):
            sequences = [batch[row] for row in rows]
            counts = [len(seq.prompt_ids) for seq in sequences]
            hidden = self.forward([t for seq in sequences for t in seq.prompt_ids], rows, counts, cache)  # [T, hidden]
            for seq, part in zip(sequences, hidden.split(counts), strict=True):
                last_hidden.append(part[-1:])
                if (top := seq.params.prompt_logprobs) is not None:
                    scored = token_logprobs(self.model.logits(part[:-1]), seq.prompt_ids[1:], top)
                    seq.prompt_logprobs = (None, *scored)
        return self.model.logits(torch.cat(last_hidden))

    def decode(self, live: list[GeneratedSequence], cache: KVCache) -> Tensor:
        """Run the newest token of each sequence and return the logits [B, V] after it."""
        rows = list(range(len(live)))
        return self.model.logits(self.forward([seq.output_ids[-1] for seq in live], rows, [1] * len(live), cache))

    def forward(self, token_ids: list[int], rows: Sequence[int], counts: Sequence[int], cache: KVCache) -> Tensor:
        """One pass over packed tokens [T], `counts[i]` of them for cache row `rows[i]`: hidden [T, hidden]."""
        positions = cache.begin(dict(zip(rows, counts, strict=True)))
        hidden = self.model(torch.tensor(token_ids, device=positions.device), positions, cache.attend)
        cache.commit()
        return hidden


def pack(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Group prompts in order, so that a group has at most PREFILL_TOKENS tokens or is one prompt."""
    group: list[int] = []
    total = 0
    for i, length in enumerate(lengths):
        if group and total + length > PREFILL_TOKENS:
            yield group
            group, total = [], 0
        group.append(i)
        total += length
    yield group
