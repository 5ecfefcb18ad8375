"""The benchmark: what it counts, what it calls a failure, and that it never leaves a server behind."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import psutil
import pytest
import torch

from shared import machine, server_process
from shared.benchmark import offline, online
from shared.engine import SetupError
from shared.load_client import Answer, BadAnswerError, ChatClient, Outcome, run_workload
from shared.machine import Limits, PeakMemory
from shared.options import base_url
from shared.plots import draw_load, draw_throughput
from shared.report import percentiles, remarks, summarise
from shared.server_process import running_server, signals_later
from shared.workload import Conversation, Turn, Workload, WorkloadConfig, batch, closed_loop
from tests.fake_server import DONE, FakeServer, frame, usage
from tests.serving import free_port, wait_until
from tests.tiny import ScriptedEngine

SMALL = WorkloadConfig(requests=2, concurrency=(1, 2), prompt_tokens=3, output_tokens=4, rate=50.0, think_time=0.01)


# --- figures, by hand -------------------------------------------------------------------------------------------------


def test_percentiles_by_hand():
    """Of 1 to 5 s: p90 lies 0.6 of the way from 4 to 5, p99 0.96 of it."""
    assert percentiles([3, 1, 5, 2, 4]) == {"p50": 3000.0, "p90": 4600.0, "p99": 4960.0}
    assert percentiles([2]) == {"p50": 2000.0, "p90": 2000.0, "p99": 2000.0}
    assert percentiles([]) is None


def test_tpot_leaves_the_first_token_out():
    """Dividing by all five tokens gives 80 ms; beginning at the request gives 200 or 250 ms."""
    assert Outcome(e2e_s=1.0, ttft_s=0.6, completion_tokens=5).tpot_s == pytest.approx(0.1)
    assert Outcome(e2e_s=1.0, ttft_s=1.0, completion_tokens=1).tpot_s is None
    assert Outcome(e2e_s=1.0, ttft_s=None, completion_tokens=5).tpot_s is None


def test_an_answer_is_timed_by_its_text_and_counted_by_its_usage():
    """The role's frame isn't the first token, and two chunks can be nine tokens."""
    answer = Answer()
    answer.feed('{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', 10.1)
    answer.feed('{"choices": [{"delta": {"content": "Hello"}}], "usage": null}', 10.5)
    answer.feed('{"choices": [{"delta": {"content": " world"}}]}', 11.0)
    answer.feed('{"choices": [{"delta": {}, "finish_reason": "length"}]}', 11.1)
    answer.feed('{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}}', 11.2)
    answer.feed("[DONE]", 12.1)
    outcome = answer.outcome(began=10.0)
    assert (outcome.text, outcome.prompt_tokens, outcome.completion_tokens) == ("Hello world", 7, 9)
    assert outcome.ttft_s == pytest.approx(0.5)
    assert outcome.e2e_s == pytest.approx(2.1)
    assert outcome.tpot_s == pytest.approx(0.2)


@pytest.mark.parametrize("data", ["nonsense", "[]", "3", '{"choices": 3}', '{"choices": [[]]}', '{"usage": {"x": 1}}'])
def test_a_malformed_frame_is_a_failure_and_no_crash(data):
    with pytest.raises(BadAnswerError):
        Answer().feed(data, 0.0)


def test_failed_requests_are_in_no_figure_but_their_own():
    """A refused request is answered in a millisecond, and would make the median look good."""
    good = Outcome(e2e_s=2.0, ttft_s=0.5, prompt_tokens=10, completion_tokens=4)
    run = summarise({"load": "batch"}, [good, good, Outcome(0.001, error="HTTP 429: full")], 4.0, 1_000_000)
    assert (run["requests"], run["failed"], run["failures"]) == (3, 1, {"HTTP 429: full": 1})
    assert (run["output_tokens_per_s"], run["total_tokens_per_s"], run["requests_per_s"]) == (2.0, 7.0, 0.5)
    assert run["e2e_ms"]["p50"] == 2000.0
    assert run["tpot_ms"]["p50"] == 500.0
    assert len(run["each"]) == 2


def test_limits_by_hand(monkeypatch):
    """100 M weights of 4 bytes at 20 GB/s: 50 tokens/s. 2 operations a weight at 100 GFLOP/s: 500 tokens/s."""
    monkeypatch.setattr(machine, "measure_bandwidth", lambda device: 20e9)
    monkeypatch.setattr(machine, "measure_flops", lambda device, dtype: 100e9)
    limits = machine.limits(100_000_000, torch.float32)
    assert (limits.decode_tokens_per_s, limits.prefill_tokens_per_s) == (50.0, 500.0)
    assert machine.limits(100_000_000, torch.float32, weight_bytes=100_000_000).decode_tokens_per_s == 200.0


def test_measured_speeds_are_of_a_real_machine():
    """A sum that is never computed, or seconds taken for milliseconds, lands far outside of these."""
    assert 1e8 < machine.measure_bandwidth() < 1e13
    assert 1e8 < machine.measure_flops("cpu", torch.float32) < 1e15


def test_peak_memory_counts_children():
    """The ranks of a tensor-parallel server hold most of its memory."""
    child = "x = bytearray(80_000_000); print(len(x), flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", parent], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"80000000\n"
        with PeakMemory(process.pid) as memory:
            pass
        process.communicate(b"\n")
    assert memory.bytes > 80_000_000


# --- the client against a scripted server -----------------------------------------------------------------------------


def send(fake: FakeServer, workload: Workload, **options) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with ChatClient(fake.url, "fake", **options) as client:
            return (await run_workload(client, workload))[0]

    return asyncio.run(run())


def one_request(max_tokens: int = 5) -> Workload:
    return Workload("batch", (Conversation((Turn("hello", max_tokens),)),))


def test_tokens_are_counted_from_usage_not_from_chunks(fake):
    [outcome] = send(fake, one_request(max_tokens=9))
    assert (outcome.error, outcome.prompt_tokens, outcome.completion_tokens, outcome.text) == (None, 3, 9, "ab")
    assert outcome.ttft_s is not None
    assert 0 < outcome.ttft_s <= outcome.e2e_s


def test_what_a_request_asks_for(fake):
    """Without ignore_eos answers end early, and engines that say less would look faster."""
    send(fake, one_request(), api_key="secret")
    send(fake, one_request(), ignore_eos=False)
    assert fake.bodies[0] == {
        "model": "fake",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert "ignore_eos" not in fake.bodies[1]
    assert fake.headers[0]["authorization"] == "Bearer secret"
    assert "authorization" not in fake.headers[1]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([frame("a"), frame(error={"message": "out of blocks"})], "error frame: out of blocks"),
        ([frame("a"), usage(3, 5)], "the stream ended without [DONE]"),
        ([frame("a"), DONE], "no usage in the stream"),
        (["data: {broken\n\n", DONE], "a frame that isn't of the API's form"),
        ([], "the stream ended without [DONE]"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(fake, frames, reason):
    """A stream that breaks off has fewer tokens, sooner: counted as an answer it makes the server look fast."""
    fake.script = lambda body: frames
    [outcome] = send(fake, one_request())
    assert outcome.error is not None
    assert outcome.error.startswith(reason)
    assert outcome.completion_tokens == 0


def test_a_stream_that_ends_with_its_finish_reason_is_whole(fake):
    """transformers' own server sends no [DONE]: every request to it was a failure."""
    choice = {"index": 0, "delta": {}, "finish_reason": "length"}
    last = {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}
    fake.script = lambda body: [frame("a"), f"data: {json.dumps(last)}\n\n"]
    [outcome] = send(fake, one_request())
    assert outcome.error is None
    assert outcome.completion_tokens == 5


def test_comments_and_frames_without_a_space_are_read(fake):
    """Servers send `: ping` in a long silence, and the space after `data:` is optional in the standard."""
    fake.script = lambda body: [": ping\n\n", frame("a").replace("data: ", "data:"), usage(3, 5), "data:[DONE]\n\n"]
    [outcome] = send(fake, one_request())
    assert (outcome.error, outcome.text) == (None, "a")


def test_an_http_error_is_a_failure_with_the_servers_reason(fake):
    fake.status = 429
    [outcome] = send(fake, one_request())
    assert outcome.error == "HTTP 429: the queue is full"


def test_a_request_that_never_ends_is_a_failure(fake):
    """Without a limit one lost answer would hold up the benchmark for ever."""
    fake.script = lambda body: [frame("a"), "hang"]
    [outcome] = send(fake, one_request(), timeout_s=0.3)
    assert outcome.error == "no whole answer within 0.3 s"


def test_no_server_is_a_failure():
    [outcome] = send(FakeServer(f"http://127.0.0.1:{free_port()}/v1"), one_request())
    assert outcome.error is not None
    assert "Connect" in outcome.error


def test_a_batch_is_sent_all_at_once(fake):
    """The HTTP library's own limit of 100 connections would turn a larger batch into a closed loop."""
    fake.together = 120
    outcomes = send(fake, batch(WorkloadConfig(requests=120, prompt_tokens=3)), timeout_s=30)
    assert [outcome.error for outcome in outcomes] == [None] * 120


def test_a_closed_loop_keeps_as_many_requests_open_as_it_has_clients():
    class Client(ChatClient):
        open, counts = 0, []  # requests open now, and when each was sent

        async def chat(self, messages, max_tokens):
            self.open += 1
            self.counts.append(self.open)
            for _ in range(20):  # turns of the event loop, in which any other request could be sent
                await asyncio.sleep(0)
            self.open -= 1
            return Outcome(e2e_s=1.0)

    workload = closed_loop(WorkloadConfig(requests=9, prompt_tokens=3), 3)
    outcomes, _ = asyncio.run(run_workload(Client(""), workload))
    assert len(outcomes) == 9
    assert max(Client.counts) == 3


def test_a_later_turn_is_sent_with_the_answer_that_came(fake):
    fake.script = lambda body: [frame(f"answer {len(body['messages'])}"), usage(3, 5), DONE]
    send(fake, Workload("realistic", (Conversation((Turn("one", 5), Turn("two", 5, 0.01)), system="brief"),)))
    assert [message["content"] for message in fake.bodies[1]["messages"]] == ["brief", "one", "answer 2", "two"]


def test_turns_after_a_failed_one_are_failures_too(fake):
    """Leaving them out would send a failing server less traffic and call it complete."""
    fake.status = 500
    outcomes = send(
        fake,
        Workload(
            "realistic",
            (
                Conversation(
                    (Turn("one", 5), Turn("two", 5)),
                ),
            ),
        ),
    )
    assert [outcome.error for outcome in outcomes] == [
        "HTTP 500: the queue is full",
        "not sent: the turn before it failed",
    ]
    assert len(fake.bodies) == 1


# --- the whole benchmark ----------------------------------------------------------------------------------------------


@pytest.fixture
def known_limits(monkeypatch, tiny_checkpoint):
    """A model folder for the heading, and limits that take no time to measure."""
    monkeypatch.setenv("MODEL", str(tiny_checkpoint))
    monkeypatch.setattr(machine, "busy_share", lambda: 0.5)
    monkeypatch.setattr(machine, "limits", lambda *args: Limits(20e9, 100e9, 400, 50.0, 500.0))


def test_any_running_server_can_be_measured(fake, tmp_path, capsys):
    """Only the client's machine is known then: its limits say nothing about the server."""
    output = tmp_path / "other-online.json"
    argv = ["--base-url", fake.url.removesuffix("/v1") + "/", "--warmup", "3", "--output", str(output)]
    online(tmp_path / "ch99_dummy", SMALL, argv=argv)
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert (result["name"], result["model"], result["limits"]) == ("other", "fake", None)
    assert [run["load"] for run in result["runs"]] == ["batch", "closed", "closed", "realistic"]
    assert [run["requests"] for run in result["runs"]] == [2, 2, 4, 2]
    assert len(fake.bodies) == 3 + 2 + 2 + 4 + 2  # the warm-up is sent, and in no run
    assert all(run["peak_memory_bytes"] is None for run in result["runs"])
    assert json.loads(output.read_text())["runs"][0]["each"]
    assert output.with_suffix(".png").stat().st_size > 10_000
    assert any("the machine above is the client's" in line for line in lines)


def test_a_server_that_refuses_everything_is_no_success(fake, tmp_path, capsys):
    fake.status = 429
    argv = ["--base-url", fake.url, "--load", "batch", "--output", str(tmp_path / "x.json")]
    with pytest.raises(SystemExit, match=r"the warm-up failed.*HTTP 429: the queue is full"):
        online(tmp_path, SMALL, argv=argv)
    with pytest.raises(SystemExit, match="all requests of a load failed"):
        online(tmp_path, SMALL, argv=[*argv, "--warmup", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert "batch: 2 failed: HTTP 429: the queue is full" in lines
    assert json.loads(lines[-1])["runs"][0]["failures"] == {"HTTP 429: the queue is full": 2}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://x:8000", "http://x:8000/v1"),
        ("http://x:8000/", "http://x:8000/v1"),
        ("http://x:8000/v1/", "http://x:8000/v1"),
        ("http://x:8000/v3", "http://x:8000/v3"),
        ("https://x/api", "https://x/api/v1"),
    ],
)
def test_the_version_in_a_base_url_is_kept(given, meant):
    """OpenVINO's server has its API at /v3, which became /v3/v1."""
    assert base_url(given) == meant


def test_no_server_at_the_base_url(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SetupError, match=url):
        online(tmp_path, SMALL, argv=["--base-url", url, "--output", str(tmp_path / "x.json")])


def test_offline(known_limits, tmp_path, capsys):
    engine = ScriptedEngine(b"some text")
    argv = ["--output", str(tmp_path / "x-offline.json"), "--warmup", "1"]
    offline(tmp_path / "ch99_dummy", lambda: engine, SMALL, batch_sizes=(1, 3), argv=argv)
    lines = capsys.readouterr().out.splitlines()
    assert "warning  other programs take 50% of the processor: all figures will be low" in lines
    result = json.loads(lines[-1])
    assert result["model"] == "scripted"
    assert [(run["load"], run["requests"], run["output_tokens"]) for run in result["runs"]] == [
        ("generate", 2, 8),
        ("generate_batch", 2, 8),
        ("generate_batch", 6, 24),
    ]
    assert result["runs"][0]["ttft_ms"] is not None
    assert result["runs"][0]["peak_memory_bytes"] > 10_000_000
    assert len(engine.prompts) == 1 + 2 + 2 + 6
    assert len(set(map(tuple, engine.prompts))) == len(engine.prompts)


def test_a_workload_that_does_not_fit_the_model_is_one_line(known_limits, tmp_path):
    argv = ["--output", str(tmp_path / "x.json"), "--prompt-tokens", "1000"]
    with pytest.raises(SetupError, match="maximum context length is 100 tokens"):
        offline(tmp_path, lambda: ScriptedEngine(b"text", max_model_len=100), SMALL, (1,), argv=argv)


def test_one_request_alone_is_held_against_the_limits():
    """10 tokens in the second after the first one: 10 tokens/s. A prompt of 30 tokens in 0.1 s: 300 tokens/s."""
    run = summarise({"load": "closed", "concurrency": 1}, [Outcome(1.1, 0.1, 30, 11)] * 2, 2.2)
    limits = {"decode_tokens_per_s": 50.0, "prefill_tokens_per_s": 400.0}
    assert remarks({"runs": [run], "limits": limits}) == [
        "decode of one request: 10.0 tokens/s, 20% of the limit of 50.0",
        "prefill of one request: 300.0 tokens/s, 75% of the limit of 400.0",
    ]


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--requests", "0"], "--requests must be at least 1"),
        (["--requests", "many"], "--requests: invalid int value: 'many'"),
        (["--concurrency", "1,zwei"], "--concurrency: zwei must be an integer of at least 1"),
        (["--concurrency", "0"], "--concurrency: 0 must be"),
        (["--rate", "nan"], "--rate must be above 0"),
        (["--multi-turn", "1.5"], "--multi-turn is a share"),
        (["--load", "batch", "--rate", "2"], "--rate has no effect on --load batch"),
        (["--load", "realistic", "--concurrency", "2"], "--concurrency has no effect on --load realistic"),
        (["--load", "everything"], "--load: invalid choice: 'everything'"),
        (["--port", "70000"], "--port: 70000 is no port"),
        (["--timeout", "inf"], "--timeout: inf must be a number"),
        (["--base-url", "localhost:8001"], "--base-url: localhost:8001 must begin with http"),
        (["--base-url", "http://127.0.0.1:1", "--port", "8001"], "--port can't be used with --base-url"),
        (["--model", "x"], "--model can't be used without --base-url"),
        (["--api-key", "x"], "--api-key can't be used without --base-url"),
        (["--output", "results.txt"], "must end in .json"),
        (["--output", "/dev/null/x.json"], "--output /dev/null/x.json: "),
        (["--req", "3"], "unrecognized arguments: --req"),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(argv, part, tmp_path, capsys):
    """Found out after the server's start, a wrong option costs a minute; with a list of all options nobody sees it."""
    with pytest.raises(SystemExit) as exit_info:
        online(tmp_path, SMALL, argv=argv)
    printed = capsys.readouterr()
    assert exit_info.value.code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert part in printed.err


# --- the server process -----------------------------------------------------------------------------------------------

DUMMY_SERVER = """
import os, signal, subprocess, sys
from pathlib import Path
from fastapi import FastAPI
from starlette.responses import JSONResponse, StreamingResponse
import asyncio

behaviour = os.environ["BEHAVIOUR"]
here = Path(__file__).parent
if behaviour == "stubborn":
    rank = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
    (here / "rank").write_text(str(rank.pid))
(here / "pid").write_text(str(os.getpid()))
if behaviour == "crash":
    raise RuntimeError("no such model")
app = FastAPI()

@app.get("/health")
def health():
    if behaviour == "stubborn":  # uvicorn has its own handlers by now
        return {}
    return JSONResponse({}, 503 if behaviour == "never ready" else 200)

@app.get("/v1/models")
def models():
    return {"data": [{"id": "dummy"}]}

@app.post("/v1/chat/completions")
async def chat(body: dict):
    async def frames():
        (here / "asked").touch()
        if behaviour == "hang":
            await asyncio.Event().wait()
        yield 'data: {"choices": [{"delta": {"content": "x"}}]}\\n\\n'
        yield 'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}\\n\\ndata: [DONE]\\n\\n'
    return StreamingResponse(frames(), media_type="text/event-stream")
"""


@pytest.fixture
def chapter(tmp_path):
    folder = tmp_path / "ch99_dummy"
    folder.mkdir()
    (folder / "05_server.py").write_text(DUMMY_SERVER)
    return folder


@contextlib.contextmanager
def benchmark_process(chapter: Path, model: Path, behaviour: str, *argv: str):
    """The benchmark as a reader runs it."""
    code = (
        "import sys; from pathlib import Path\n"
        "from shared.benchmark import online; from shared.workload import WorkloadConfig\n"
        f"online(Path(sys.argv[1]), {SMALL!r}, argv=sys.argv[2:])"
    )
    command = [sys.executable, "-c", code, str(chapter), "--output", str(chapter / "out.json"), *argv]
    environment = os.environ | {"MODEL": str(model), "BEHAVIOUR": behaviour}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def pid_in(file: Path) -> int:
    wait_until(lambda: file.is_file() and file.read_text(), seconds=60)
    return int(file.read_text())


def test_a_whole_run(chapter, tiny_checkpoint):
    """The last line of stdout is JSON whatever else is printed, and the server is gone before the benchmark is."""
    with benchmark_process(chapter, tiny_checkpoint, "ok") as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert (result["name"], result["model"], result["dtype"]) == ("out", "dummy", "float32")
    assert result["limits"]["decode_tokens_per_s"] > 0
    assert result["machine"]["threads"] >= 1
    assert all(run["failed"] == 0 and run["peak_memory_bytes"] > 10_000_000 for run in result["runs"])
    assert out.index("decode   at most") < out.index("TTFT ms"), "physics first"
    assert (chapter / "out.png").is_file()
    assert is_gone(pid_in(chapter / "pid"))


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_server_too(chapter, tiny_checkpoint, signum, status):
    """The server is in a process group of its own: Ctrl-C reaches the benchmark only."""
    with benchmark_process(chapter, tiny_checkpoint, "hang") as process:
        wait_until(lambda: (chapter / "asked").exists() or process.poll() is not None, seconds=120)
        process.send_signal(signum)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in err
    assert ("stopped by Ctrl-C" in err) == (signum == signal.SIGINT)
    assert is_gone(pid_in(chapter / "pid"))


def test_killing_the_benchmark_ends_the_server_too(chapter, tiny_checkpoint):
    """A killed process can't clean up: the server went on serving on its port for ever."""
    with benchmark_process(chapter, tiny_checkpoint, "hang") as process:
        wait_until(lambda: (chapter / "asked").exists() or process.poll() is not None, seconds=120)
        process.kill()
        wait_until(lambda: is_gone(pid_in(chapter / "pid")), seconds=30)


def test_a_server_that_ends_at_once_is_reported_with_its_log(chapter, monkeypatch):
    monkeypatch.setenv("BEHAVIOUR", "crash")
    report = r"ended with status 1 before it was ready(.|\n)*RuntimeError: no such model"
    with pytest.raises(SetupError, match=report), running_server(chapter):
        pass


def test_a_server_that_never_gets_ready_is_ended(chapter, monkeypatch):
    monkeypatch.setenv("BEHAVIOUR", "never ready")
    with pytest.raises(SetupError, match=r"wasn't ready within 0.5 s"), running_server(chapter, startup_s=0.5):
        pass
    assert not (chapter / "pid").exists() or is_gone(pid_in(chapter / "pid"))


def test_a_failure_in_the_benchmark_ends_the_server_and_its_ranks(chapter, monkeypatch):
    """Ranks that don't hear SIGTERM outlived the server that started them."""
    monkeypatch.setenv("BEHAVIOUR", "stubborn")

    def fail_while_the_rank_runs() -> None:
        with running_server(chapter):
            assert not is_gone(pid_in(chapter / "rank"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_while_the_rank_runs()
    assert is_gone(pid_in(chapter / "pid"))
    wait_until(lambda: is_gone(pid_in(chapter / "rank")))


def test_a_server_that_does_not_hear_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr(server_process, "STOP_S", 0.2)
    code = "import signal; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as stubborn:
        assert stubborn.stdout is not None
        assert stubborn.stdout.readline() == b"ready\n"
        server_process.end(stubborn)
        assert stubborn.returncode == -signal.SIGKILL


def test_a_port_in_use_is_refused_before_anything_starts(chapter):
    """The other server there would answer /health, and be measured in place of the chapter's."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"port {port} can't be used"), running_server(chapter, port):
            pass
    assert not (chapter / "pid").exists()


def test_a_signal_during_the_ending_waits_for_its_end():
    """A second, impatient Ctrl-C left the server running."""
    steps = []

    def end_with_a_signal() -> None:
        with signals_later():
            signal.raise_signal(signal.SIGINT)
            steps.append("ended")
        steps.append("unreached")

    with pytest.raises(KeyboardInterrupt):
        end_with_a_signal()
    assert steps == ["ended"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- pictures ---------------------------------------------------------------------------------------------------------


def result_with(name: str, throughput: float) -> dict:
    runs = [
        summarise({"load": "closed", "concurrency": c}, [Outcome(1.0, 0.5, 3, int(throughput))], 1.0) for c in (1, 4)
    ]
    return {"name": name, "model": "tiny", "runs": runs}


def test_all_results_are_inside_the_axes():
    """A limit set after the first line hid all chapters faster than the first."""
    figure, ax = plt.subplots()
    draw_throughput(ax, [(result_with("slow", 5), {}), (result_with("fast", 500), {})])
    assert ax.get_ylim()[0] == 0
    assert ax.get_ylim()[1] > 500
    assert list(ax.get_xticks()) == [1, 4]
    plt.close(figure)


def test_several_results_in_one_figure_from_the_command_line(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, speed in zip(files, (5, 500), strict=True):
        file.write_text(json.dumps(result_with(file.stem, speed)))
    command = [sys.executable, "-m", "shared.plots", "-o", str(tmp_path / "figure.png")]
    subprocess.run([*command, *map(str, files)], check=True, timeout=60)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    wrong = subprocess.run([*command, str(tmp_path / "c.json")], capture_output=True, text=True, timeout=60)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def test_a_run_in_which_everything_failed_is_not_drawn(tmp_path):
    result = {"name": "x", "model": "tiny", "runs": [summarise({"load": "batch"}, [Outcome(1.0, error="no")], 1.0)]}
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_load([result], tmp_path / "x.png")
