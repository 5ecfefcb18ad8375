"""Real HTTP servers for tests: uvicorn in a thread around a fake engine, or in a process around a real one."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import requests
import uvicorn
from fastapi import FastAPI

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition, seconds: float = 10.0) -> None:
    """Poll until `condition()` holds. Raises AssertionError with its name if it doesn't in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {condition}"
        time.sleep(0.01)


@contextlib.contextmanager
def serve(app: FastAPI) -> Iterator[str]:
    """Serve `app` over real HTTP from a thread and yield its base URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=free_port(), log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started, "uvicorn didn't start"
        yield f"http://127.0.0.1:{server.config.port}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server didn't stop"


@contextlib.contextmanager
def serve_chapter(chapter: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """Start a chapter's server as a reader does, and yield its base URL and process."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "05_server:app", "--port", str(port)]
    process = subprocess.Popen(
        command,
        cwd=ROOT / chapter,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, f"the server ended: {process.stderr.read() if process.stderr else ''}"
        with contextlib.suppress(requests.ConnectionError):
            return requests.get(url + "/health", timeout=5).status_code == 200
        return False

    try:
        wait_until(ready, seconds=60)
        yield url, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(20)
        if process.stderr is not None:
            process.stderr.close()
