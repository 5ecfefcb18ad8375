"""Run a chapter's server as a process of its own, and never leave it behind.

Its context manager ends it on success, failure, Ctrl-C and SIGTERM; if this process is killed outright, a guard process
sees its pipe close and ends the server. It knows uvicorn and /health, and no engine.

    chapter folder -> uvicorn process (+ guard) -> /health says 200 -> base URL -> SIGTERM, SIGKILL
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import requests
from tqdm import tqdm

from shared.engine import SetupError

HOST = "127.0.0.1"
STOP_S = 10  # for a server to end after SIGTERM


@dataclass(frozen=True)
class RunningServer:
    base_url: str
    pid: int


@contextmanager
def running_server(
    folder: Path, port: int | None = None, startup_s: float = 120, environment: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """The server of the chapter in `folder`, ready for requests, on `port` or a free one.

    environment: its variables; default: ours.
    Raises SetupError, with the end of the server's log, if it isn't ready within `startup_s`; SystemExit if SIGTERM
    comes. To be used in the main thread, which gets the signals.
    """
    port = free_port() if port is None else port
    check_port(port)
    command = [sys.executable, "-m", "uvicorn", "05_server:app", "--host", HOST, "--port", str(port)]
    guard: subprocess.Popen[str] | None = None
    server: subprocess.Popen[bytes] | None = None
    before = signal.signal(signal.SIGTERM, exit_on_sigterm)
    try:
        with tempfile.TemporaryFile() as log:
            with signals_later():
                guard = subprocess.Popen(
                    [sys.executable, "-m", "shared.server_process"],
                    stdin=subprocess.PIPE, text=True, start_new_session=True,
                )  # fmt: skip
                server = subprocess.Popen(
                    command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
                )
                tell(guard, server.pid)
            wait_until_ready(server, f"http://{HOST}:{port}/health", startup_s, log.fileno())
            yield RunningServer(f"http://{HOST}:{port}/v1", server.pid)
    finally:
        with signals_later():  # a second Ctrl-C must not stop the ending
            if server is not None:
                end(server)
            if guard is not None:
                tell(guard, 0)
                guard.communicate()
        signal.signal(signal.SIGTERM, before)


def exit_on_sigterm(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


@contextmanager
def signals_later() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect at the end of the block instead of in the middle of it."""
    caught: list[int] = []
    before = {s: signal.signal(s, lambda signum, frame: caught.append(signum)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        if caught:
            signal.raise_signal(caught[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Raises SetupError if something listens on `port`: it would answer /health in place of our server."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise SetupError(f"port {port} can't be used ({error.strerror}): choose another one with --port.") from None


def wait_until_ready(server: subprocess.Popen[bytes], health_url: str, limit_s: float, log: int) -> None:
    """Poll until `health_url` answers 200. Raises SetupError if the server ends first or isn't ready in time."""
    ends = time.monotonic() + limit_s
    with tqdm(desc="starting the server", bar_format="{desc}: {elapsed}", leave=False, disable=None) as bar:
        while True:
            bar.refresh()
            status = server.poll()
            if status is not None:
                raise SetupError(f"the server ended with status {status} before it was ready. {last_lines(log)}")
            if time.monotonic() > ends:
                raise SetupError(f"the server wasn't ready within {limit_s:g} s (--startup-timeout). {last_lines(log)}")
            try:
                if requests.get(health_url, timeout=2).status_code == 200:
                    return
            except requests.RequestException:
                pass  # it doesn't listen yet
            time.sleep(0.1)


def last_lines(log: int, count: int = 12) -> str:
    size = os.fstat(log).st_size
    tail = os.pread(log, 8192, max(0, size - 8192)).decode(errors="replace").strip().splitlines()[-count:]
    return "\n".join(["Its log ends in:", *(f"  {line}" for line in tail)]) if tail else "It wrote no log."


def end(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM, so that it can end its own processes, and SIGKILL to whatever of its group is left after `STOP_S`."""
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(STOP_S)
    kill_group(server.pid)
    server.wait()


def kill_group(pid: int, signum: int = signal.SIGKILL) -> bool:
    """Signal the process group that `pid` leads. Returns False if nothing is left of it."""
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        return False
    return True


def tell(guard: subprocess.Popen[str], pid: int) -> None:
    """Whose group the guard has to end when this process is gone; 0 for nobody's."""
    assert guard.stdin is not None
    with suppress(BrokenPipeError):  # somebody ended the guard; `end` ends the server all the same
        print(pid, file=guard.stdin, flush=True)


def stand_guard() -> None:
    """The guard process: wait until the benchmark closes the pipe, or is killed, and end what it left."""
    told = sys.stdin.read().split()
    pid = int(told[-1]) if told else 0
    if pid and kill_group(pid, signal.SIGTERM):
        ends = time.monotonic() + STOP_S
        while time.monotonic() < ends and kill_group(pid, 0):
            time.sleep(0.1)
        kill_group(pid)


if __name__ == "__main__":
    stand_guard()
