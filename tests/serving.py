"""Real HTTP servers for tests: uvicorn in a thread around a fake engine, or in a process around a real one."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import requests
import uvicorn
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from shared.server_process import free_port

ROOT = Path(__file__).resolve().parent.parent


def wait_until(condition, seconds: float = 10.0) -> None:
    """Poll until `condition()` holds. Raises AssertionError with its name if it doesn't in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {condition}"
        time.sleep(0.01)


def samples(url: str) -> dict[str, float]:
    """Every sample of /metrics, read by Prometheus' own parser."""
    families = text_string_to_metric_families(requests.get(url + "/metrics", timeout=5).text)
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


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
