"""What goes into a step and who asked for it: requests, plans, and the model over a plan.

It knows plain data and the model's interface; it knows no scheduler, no cache and no thread.

    scheduled sequences -> Plan (lists of numbers) -> run -> logits [R, V]
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ch09_async_scheduling.scheduler import ScheduledSequence
from shared.engine import Delta
from shared.model import Attend, Transformer

Item = Delta | Exception | None  # what a request's reader gets; None is the end
Put = Callable[[Item], None]
StillWanted = Callable[[], None]  # raises Interrupted when nobody waits for what is being computed


@dataclass
class Plan:
    """One forward pass as plain data: T packed tokens of S sequences, and the R rows whose logits are asked for."""

    token_ids: list[int]  # [T]
    starts: list[int]  # [S], tokens that are in the cache already
    counts: list[int]  # [S], new tokens; they sum to T
    rows: list[int]  # [R]


@dataclass
class SlotPlan(Plan):
    """A pass whose sequences each have a slot."""

    slots: list[int]  # [S]


@dataclass(eq=False)
class Request:
    """What was submitted: its choices, and where its deltas go."""

    id: str
    put: Put
    sequences: list[ScheduledSequence]
    unfinished: int  # choices
    arrived: float = field(default_factory=time.perf_counter)
    aborted: bool = False


class Interrupted(Exception):
    """A pass was given up in the middle, because nobody waits for any of its sequences."""


def run(model: Transformer, plan: Plan, attend: Attend, still_wanted: StillWanted = lambda: None) -> Tensor:
    """The model over a plan, with a cache behind `attend`: logits [R, V]."""

    def attend_if_wanted(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        still_wanted()
        return attend(layer, q, k, v)

    device = model.frequencies.device
    ranges = [torch.arange(start, start + count) for start, count in zip(plan.starts, plan.counts, strict=True)]
    token_ids, positions = torch.tensor(plan.token_ids), torch.cat(ranges)
    hidden = model(token_ids.to(device), positions.to(device), attend_if_wanted)  # [T, hidden]
    return model.logits(hidden[plan.rows]) if plan.rows else hidden[:0]
