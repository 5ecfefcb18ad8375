"""A step trace: one JSON line a step of an online engine, for whoever wants to see what the scheduler did.

It knows a file and plain values; it knows no engine. `python -m shared.plots trace.jsonl -o timeline.png` draws it.

    engine -> arrived, ended, step -> {"t": ..., "scheduled": [...], ...} -> read_trace -> plots.draw_timeline
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.errors import SetupError


class StepTrace:
    """Writes a line a step; times are seconds since the trace began.

    t, seconds             when the step began and how long it took
    arrived                [request, when], of those that came since the line before
    scheduled              [request, choice, tokens, "prefill" or "decode"]
    prefill_tokens, decode_tokens, running, waiting
    used, total            of what the cache hands out: slots, or blocks
    ended                  [request, when, "done", "aborted" or "failed"]
    interrupted            true if the pass was given up, since nobody waited for it any more

    Raises SetupError if the file can't be written.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("w", buffering=1, encoding="utf-8")  # noqa: SIM115, it is open as long as the engine
        except OSError as error:
            raise SetupError(f"TRACE={path}: {error.strerror}. Name a file that can be written.") from None
        self._began = time.perf_counter()
        self._arrived: list[tuple[str, float]] = []
        self._ended: list[tuple[str, float, str]] = []

    def arrived(self, request_id: str, at: float) -> None:
        self._arrived.append((request_id, self._since(at)))

    def ended(self, request_id: str, how: str) -> None:
        self._ended.append((request_id, self._since(time.perf_counter()), how))

    def step(
        self,
        began: float,
        scheduled: Sequence[tuple[str, int, int, str]],
        running: int,
        waiting: int,
        memory: tuple[int, int],
        interrupted: bool = False,
    ) -> None:
        """Write the line of a step that began at `began`, of time.perf_counter, and is over now."""
        tokens = {phase: sum(row[2] for row in scheduled if row[3] == phase) for phase in ("prefill", "decode")}
        line = {
            "t": self._since(began),
            "seconds": round(time.perf_counter() - began, 6),
            "arrived": self._arrived,
            "scheduled": scheduled,
            "prefill_tokens": tokens["prefill"],
            "decode_tokens": tokens["decode"],
            "running": running,
            "waiting": waiting,
            "used": memory[0],
            "total": memory[1],
            "ended": self._ended,
            "interrupted": interrupted,
        }
        self._file.write(json.dumps(line) + "\n")
        self._arrived, self._ended = [], []

    def close(self) -> None:
        """Write what came after the last step."""
        if self._arrived or self._ended:
            self.step(time.perf_counter(), [], 0, 0, (0, 0))
        self._file.flush()

    def _since(self, at: float) -> float:
        return round(at - self._began, 6)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The lines of a trace. Raises ValueError if it is none, or empty."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines or any(not isinstance(line, dict) or "scheduled" not in line for line in lines):
        raise ValueError("it is no step trace")
    return lines
