"""The step trace: what was written is read back, drawn, and refused with one line if it is something else."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ch09_async_scheduling.engine import AsyncEngine
from shared.engine import SamplingParams
from shared.errors import SetupError
from shared.plots import at_once, draw_timeline, over_time, trace_rows
from shared.trace import StepTrace, read_trace
from tests.stepped import Arrival, new_engine, run


def draw(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shared.plots", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def step_of(t: float, *scheduled: list, arrived: tuple = (), ended: tuple = ()) -> dict[str, Any]:
    """A line of a trace whose step takes a second; scheduled as [request, choice, tokens, phase]."""
    sums = {f"{phase}_tokens": sum(row[2] for row in scheduled if row[3] == phase) for phase in ("prefill", "decode")}
    return {"t": t, "seconds": 1.0, "scheduled": list(scheduled), "arrived": arrived, "ended": ended, **sums}


# --- written and read -------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    trace = StepTrace(str(path))
    began = time.perf_counter()
    trace.arrived("a", began)
    trace.arrived("b", began)
    trace.step(began, [("a", 0, 7, "prefill"), ("b", 0, 1, "decode"), ("c", 1, 1, "decode")], 3, 2, (3, 16))
    trace.ended("a", "done")
    trace.close()
    first, last = read_trace(path)
    assert first["scheduled"] == [["a", 0, 7, "prefill"], ["b", 0, 1, "decode"], ["c", 1, 1, "decode"]]
    assert [name for name, _ in first["arrived"]] == ["a", "b"]
    assert (first["prefill_tokens"], first["decode_tokens"]) == (7, 2)
    assert (first["running"], first["waiting"], first["used"], first["total"]) == (3, 2, 3, 16)
    assert first["ended"] == last["arrived"] == last["scheduled"] == []
    assert [(name, how) for name, _, how in last["ended"]] == [("a", "done")]
    assert 0 <= first["t"] == first["arrived"][0][1] <= last["ended"][0][1]


def test_a_step_can_be_read_while_the_engine_runs(tmp_path: Path):
    """A trace that is written only at the end is lost when the server is killed."""
    path = tmp_path / "trace.jsonl"
    StepTrace(str(path)).step(time.perf_counter(), [("a", 0, 7, "prefill")], 1, 0, (1, 16))
    assert len(read_trace(path)) == 1


def test_a_trace_that_cannot_be_written_stops_the_start_with_a_sentence(tmp_path: Path):
    with pytest.raises(SetupError, match=r"TRACE=.*No such file or directory"):
        StepTrace(str(tmp_path / "nowhere" / "trace.jsonl"))


def test_an_engines_trace_tells_every_step_and_is_drawn(tiny_checkpoint, tmp_path: Path):
    trace, figure = tmp_path / "trace.jsonl", tmp_path / "timeline.png"
    engine = new_engine(tiny_checkpoint, AsyncEngine, max_num_seqs=2, max_num_batched_tokens=8, trace=str(trace))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    began = time.perf_counter()
    run(engine, [Arrival("x" * 20, params), Arrival("y", params), Arrival("z", params)])
    seconds = time.perf_counter() - began
    engine._trace.close()
    steps = read_trace(trace)
    assert sum(step["prefill_tokens"] for step in steps) == 22
    assert max(step["prefill_tokens"] + step["decode_tokens"] for step in steps) == 8
    assert sum(step["decode_tokens"] for step in steps) == 3 * 2
    assert [request for step in steps for request, _ in step["arrived"]] == ["r0", "r1", "r2"]
    assert {(request, how) for step in steps for request, _, how in step["ended"]} == {
        (f"r{k}", "done") for k in range(3)
    }
    assert all(step["running"] <= 2 and step["total"] == 2 for step in steps[:-1])
    assert sum(step["seconds"] for step in steps) <= seconds
    rows = [[kind for *_, kind in row] for row in trace_rows(steps)]
    assert rows == [["waiting", "prefill", "decode", "done"]] * 3
    result = draw(trace, "-o", figure)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.stat().st_size > 10_000


def test_a_pass_that_was_given_up_has_a_line_and_its_request_was_aborted(tiny_checkpoint, tmp_path: Path):
    """It was a hole in the picture, and the request looked as if it had got its answer."""
    path = tmp_path / "trace.jsonl"
    engine = new_engine(tiny_checkpoint, AsyncEngine, trace=str(path))
    forward = engine.forward

    def abort_in_the_middle(plan, still_wanted):
        engine.abort("r0")
        return forward(plan, still_wanted)

    engine.forward = abort_in_the_middle
    run(engine, [Arrival("x" * 20, SamplingParams(max_tokens=3, ignore_eos=True))])
    engine._trace.close()
    given_up, *rest = read_trace(path)
    assert given_up["interrupted"]
    assert given_up["scheduled"] == [["r0", 0, 20, "prefill"]]
    assert [(request, how) for step in rest for request, _, how in step["ended"]] == [("r0", "aborted")]
    [row] = trace_rows([given_up, *rest])
    assert [kind for *_, kind in row if kind != "waiting"] == ["prefill", "aborted"]


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_chunks_and_steps_in_a_row_are_one_bar():
    """A bar a step has seams, and hundreds of them are slow to draw."""
    steps = [
        step_of(1, ["a", 0, 8, "prefill"], arrived=(["a", 0.5],)),
        step_of(2.001, ["a", 0, 2, "prefill"]),
        step_of(3.002, ["a", 0, 1, "decode"]),
        step_of(4.003, ["a", 0, 1, "decode"], ended=(["a", 5.002, "done"],)),
    ]
    end = 4.003 + 1
    assert trace_rows(steps) == [
        [(0.5, 1, "waiting"), (1, 2.001 + 1, "prefill"), (2.001 + 1, end, "decode"), (end, end, "done")]
    ]


def test_a_step_without_a_request_is_a_wait_in_its_row():
    """Whoever was preempted would look as if it ran."""
    steps = [
        step_of(0, ["a", 0, 4, "prefill"], arrived=(["a", 0.0], ["b", 0.0])),
        step_of(1, ["b", 0, 4, "prefill"]),
        step_of(2, ["a", 0, 5, "prefill"], ended=(["b", 2.5, "done"],)),
    ]
    first, second = trace_rows(steps)
    assert first == [
        (0, 0, "waiting"),
        (0, 1, "prefill"),
        (1, 2, "waiting"),
        (2, 3, "prefill"),
    ]
    assert [kind for *_, kind in second] == ["waiting", "prefill", "waiting", "done"]


def test_each_choice_has_a_row_in_order_of_arrival():
    steps = [
        step_of(1, ["b", 0, 4, "prefill"], arrived=(["b", 0.0], ["a", 0.5])),
        step_of(2, ["b", 1, 1, "decode"], ["b", 0, 1, "decode"], ["a", 0, 4, "prefill"]),
        step_of(3, ["b", 0, 1, "decode"], ended=(["b", 3.9, "done"],)),
    ]
    rows = trace_rows(steps)
    assert [row[0][0] for row in rows] == [0.0, 0.0, 0.5]
    assert rows[1] == [(0, 2, "waiting"), (2, 3, "decode"), (3, 3, "done")]  # not until its sister is done


def test_whoever_gave_up_in_the_queue_has_a_row():
    steps = [step_of(0, arrived=(["a", 0.25], ["b", 0.5]), ended=(["a", 2.0, "aborted"],))]
    assert trace_rows(steps) == [[(0.25, 2.0, "waiting"), (2.0, 2.0, "aborted")], []]


def test_a_trace_may_begin_in_the_middle():
    """`tail -n 100 trace.jsonl` of a server that has run for days is a trace too."""
    steps = [step_of(7, ["a", 0, 1, "decode"], ended=(["a", 8.0, "done"], ["long gone", 7.5, "done"]))]
    assert trace_rows(steps) == [[(7, 7, "waiting"), (7, 8, "decode"), (8, 8, "done")]]


def test_requests_are_counted_at_every_moment():
    rows = [[(0.0, 2.0, "waiting"), (2.0, 3.0, "decode")], [(0.0, 1.0, "waiting"), (1.0, 2.0, "prefill")]]
    assert at_once(rows, {"waiting"}) == ([0, 1, 2], [2, 1, 0])
    assert at_once(rows, {"prefill", "decode"}) == ([1, 2, 3], [1, 1, 0])
    assert at_once([], {"waiting"}) == ([], [])


def test_nothing_is_drawn_between_two_steps():
    """A line that goes on through an idle second says that the engine computed."""
    steps = [step_of(0, ["a", 0, 4, "prefill"]), step_of(5, ["b", 0, 6, "prefill"])]
    x, y = over_time(steps, [4, 6])
    assert list(zip(x, y, strict=True)) == [(0, 4), (1, 4), (1, 0), (5, 0), (5, 6), (6, 6)]


@pytest.mark.parametrize("requests", [1, 5, 60, 300])
def test_any_number_of_requests_is_drawn(tmp_path: Path, requests: int):
    steps = []
    for i in range(requests + 3):
        running = [[f"r{k}", 0, 1, "decode"] for k in range(max(0, i - 3), min(i, requests))]
        if i < requests:
            running.append([f"r{i}", 0, 9, "prefill"])
        steps.append(
            step_of(
                i,
                *running,
                arrived=([f"r{i}", i / 2],),
                ended=([f"r{i - 3}", i + 1, ("done", "aborted", "failed")[i % 3]],),
            )
        )
    draw_timeline(steps, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 10_000


# --- what can't be drawn ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("", "no step trace"),
        ("{}", "no step trace"),
        ("x", "no step trace"),
        ('{"scheduled": []}', "no step trace"),
        ('{"t": 0, "seconds": 1, "scheduled": [], "arrived": [], "ended": []}', "no request"),
    ],
)
def test_what_is_no_trace_gets_one_line(tmp_path: Path, content: str | None, message: str):
    trace = tmp_path / "trace.jsonl"
    if content is not None:
        trace.write_text(content)
    assert_one_line(draw(trace, "-o", tmp_path / "x.png"), message)


def test_bytes_that_are_no_text_get_one_line(tmp_path: Path):
    (tmp_path / "trace.jsonl").write_bytes(b"\xff\xfe\x00")
    assert_one_line(draw(tmp_path / "trace.jsonl", "-o", tmp_path / "x.png"), "no step trace")


def test_two_traces_get_one_line(tmp_path: Path):
    assert_one_line(draw("a.jsonl", "b.jsonl", "-o", tmp_path / "x.png"), "give one file")


@pytest.mark.parametrize(("figure", "message"), [("nowhere/x.png", "No such file"), ("x.sheet", "sheet")])
def test_a_figure_that_cannot_be_written_gets_one_line(tmp_path: Path, figure: str, message: str):
    """An unknown kind of picture was called a bad trace."""
    trace = StepTrace(str(tmp_path / "trace.jsonl"))
    trace.arrived("a", time.perf_counter())
    trace.close()
    result = draw(tmp_path / "trace.jsonl", "-o", tmp_path / figure)
    assert_one_line(result, message)
    assert "no step trace" not in result.stderr


def assert_one_line(result: subprocess.CompletedProcess[str], message: str) -> None:
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert message in line
