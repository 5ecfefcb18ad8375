"""Which sequences the next step computes, and how many tokens of each. Decided anew at every step.

It knows sequences, a token budget and whether the cache has room. It knows no tensor, no thread and no HTTP.

    add -> waiting -> admit -> running -> finish
                        schedule() -> [(sequence, tokens), ...]: decodes first, then prefill chunks

The idea is continuous batching, or iteration-level scheduling (Orca, OSDI 2022, section 3.1), with prompts cut into
chunks that share a step with decodes (Sarathi-Serve, arXiv:2403.02310, section 4).
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol

from ch05_kv_cache.engine import TimedSequence
from shared.engine import SamplingParams, TokenIds, TokenLogprob
from shared.tokenizer import Tokenizer


class ScheduledSequence(TimedSequence):
    """A sequence that is computed in pieces.

    `computed` tokens are in the cache; the rest, of the prompt or the newest output token, are still to run. The next
    token is sampled once nothing is left. `slot` is where the cache keeps it while it runs.

        prompt_ids + output_ids:   0            computed           len
                                   | in the cache | to be computed |
    """

    def __init__(
        self, prompt_ids: TokenIds, params: SamplingParams, tokenizer: Tokenizer, max_model_len: int, index: int = 0
    ) -> None:
        super().__init__(prompt_ids, params, tokenizer, max_model_len)
        self.index = index  # the choice
        self.computed = 0
        self.slot: int | None = None
        self.scored: list[TokenLogprob] = []  # of the prompt, chunk by chunk
        self.owner: Any = None  # the request that it is a choice of: the engine's business

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def left(self) -> int:
        """Tokens to be computed before the next one can be sampled."""
        return len(self) - self.computed

    @property
    def phase(self) -> str:
        return "decode" if self.output_ids and self.left == 1 else "prefill"

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of all prompt tokens are asked for, and not only those after the last."""
        return self.params.prompt_logprobs is not None and not self.output_ids

    def tokens(self, start: int, count: int) -> list[int]:
        """Tokens [start, start + count) of prompt and output, without joining the two."""
        prompt, end = len(self.prompt_ids), start + count
        return self.prompt_ids[start:end] + self.output_ids[max(0, start - prompt) : max(0, end - prompt)]


class Room(Protocol):
    """What the scheduler asks of a cache."""

    def admit(self, seq: ScheduledSequence) -> bool:
        """Take a sequence in, or return False and change nothing."""

    def release(self, seq: ScheduledSequence) -> None:
        """Take back all that the sequence has."""


class Scheduler:
    """First come, first served, under two bounds: sequences that run, and tokens in a step.

    Every running sequence that is ready to decode gets its token in every step; what is left of the budget goes to
    prompts, in order of arrival. So a long prompt delays the running streams by one chunk, never by the whole of it.
    """

    def __init__(self, room: Room, max_num_seqs: int, token_budget: int) -> None:
        self.room, self.max_num_seqs, self.token_budget = room, max_num_seqs, token_budget
        # Both in order of arrival. As keys, so that any of thousands can leave from the middle at once.
        self.waiting: OrderedDict[ScheduledSequence, None] = OrderedDict()
        self.running: OrderedDict[ScheduledSequence, None] = OrderedDict()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: ScheduledSequence) -> None:
        self.waiting[seq] = None

    def remove(self, seq: ScheduledSequence) -> None:
        """It has finished, failed or been aborted; in whatever state, and more than once, it is gone."""
        if seq in self.running:
            del self.running[seq]
            self.room.release(seq)
        self.waiting.pop(seq, None)

    def schedule(self) -> list[tuple[ScheduledSequence, int]]:
        """The next step's sequences with their tokens, at most `token_budget` together. Admits who fits."""
        budget, step = self.token_budget, []
        for seq in [*self.decoding(), *self.prefilling()]:
            count = min(seq.left, budget)
            if count:
                step.append((seq, count))
                budget -= count
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            seq = next(iter(self.waiting))
            if not self.admit(seq):
                break  # nobody overtakes it
            count = min(seq.left, budget)
            step.append((seq, count))
            budget -= count
        return step

    def advance(self, seq: ScheduledSequence, count: int) -> None:
        """The cache has `count` more of its tokens."""
        seq.computed += count

    def decoding(self) -> list[ScheduledSequence]:
        return [seq for seq in self.running if seq.left == 1]

    def prefilling(self) -> list[ScheduledSequence]:
        return [seq for seq in self.running if seq.left > 1]

    def admit(self, seq: ScheduledSequence) -> bool:
        """Move the first in the queue to the running ones, if the cache takes it."""
        if not self.room.admit(seq):
            return False
        del self.waiting[seq]
        self.running[seq] = None
        return True

    def check_integrity(self, sequences: Iterable[ScheduledSequence]) -> None:
        """Raise AssertionError if the queues aren't exactly these unfinished sequences, each in one of them."""
        assert not self.waiting.keys() & self.running.keys(), "a sequence is waiting and running at once"
        assert set(sequences) == self.waiting.keys() | self.running.keys(), "a sequence is lost or forgotten"
        assert len(self.running) <= self.max_num_seqs, "more sequences run than may"
        assert all(seq.left >= 1 and not seq.finished for seq in self.running), "a running sequence has nothing to do"
        self.check_places()

    def check_places(self) -> None:
        """Raise AssertionError if a place in the cache has two owners, or a sequence the wrong number of them."""
        slots = [seq.slot for seq in self.running]
        assert None not in slots, "a running sequence has no slot"
        assert len(set(slots)) == len(slots), "two running sequences share a slot"
        assert all(seq.slot is None for seq in self.waiting), "a waiting sequence holds a slot"
