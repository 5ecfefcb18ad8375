"""The step trace: what was written is read back, drawn, and refused with one line if it is something else."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ch09_async_scheduling.engine import AsyncEngine
from shared.engine import SamplingParams
from shared.plots import trace_rows
from shared.trace import read_trace
from tests.stepped import Arrival, new_engine, run


def draw(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shared.plots", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_trace_tells_every_step_and_is_drawn(tiny_checkpoint, tmp_path: Path):
    trace, figure = tmp_path / "trace.jsonl", tmp_path / "timeline.png"
    engine = new_engine(tiny_checkpoint, AsyncEngine, max_num_seqs=2, max_num_batched_tokens=8, trace=str(trace))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    began = time.perf_counter()
    run(engine, [Arrival("x" * 20, params), Arrival("y", params), Arrival("z", params)])
    seconds = time.perf_counter() - began
    engine._trace.close()
    steps = read_trace(trace)
    assert sum(step["prefill_tokens"] for step in steps) == 22
    assert sum(step["decode_tokens"] for step in steps) == 3 * 2
    assert [request for step in steps for request, _ in step["arrived"]] == ["r0", "r1", "r2"]
    assert {request for step in steps for request, _ in step["ended"]} == {"r0", "r1", "r2"}
    assert all(step["running"] <= 2 and step["total"] == 2 for step in steps[:-1])
    assert sum(step["seconds"] for step in steps) <= seconds
    rows = trace_rows(steps)
    assert [[kind for *_, kind in row if kind != "waiting"] for row in rows][1:] == [
        ["prefill", "decode", "decode"]
    ] * 2
    result = draw(trace, "-o", figure)
    assert (result.returncode, result.stderr) == (0, "")
    assert figure.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("", "no step trace"), ("{}", "no step trace"), ("x", "no step trace")],
)
def test_what_is_no_trace_gets_one_line(tmp_path: Path, content: str | None, message: str):
    trace = tmp_path / "trace.jsonl"
    if content is not None:
        trace.write_text(content)
    result = draw(trace, "-o", tmp_path / "x.png")
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
