"""What all tests share: no hub, one thread a model, none of the reader's settings, and the checkpoints and servers."""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # threads that spin on a busy core slow each other a hundred times
for name in ("MODEL", "DEVICE", "DTYPE", "MAX_MODEL_LEN", "API_KEY", "NATIVE"):
    os.environ.pop(name, None)  # a reader's own settings must not change what the tests see

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.checkpoint import MODELS
from shared.config import BUNDLED_MODEL, FIRST_CHAPTER
from shared.server import make_app
from tests.fake_server import FakeServer
from tests.serving import serve
from tests.tiny import ScriptedEngine, save_tiny_checkpoint

for name in FIRST_CHAPTER:
    os.environ.pop(name, None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in `make test &` in a script
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def real_model() -> str:
    if not (MODELS / BUNDLED_MODEL / "config.json").is_file():
        pytest.skip("the bundled model isn't set up: run `make model`")
    return BUNDLED_MODEL


@pytest.fixture(scope="session")
def _scripted_server() -> Iterator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine()
    with serve(make_app(engine)) as url:
        yield engine, url


@pytest.fixture
def scripted(_scripted_server: tuple[ScriptedEngine, str]) -> tuple[ScriptedEngine, str]:
    """A scripted engine behind real HTTP, as new: (engine, base URL)."""
    engine, url = _scripted_server
    engine.reset()
    return engine, url


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """A server that answers as a test's script says, behind real HTTP."""
    server = FakeServer()
    with serve(server.app) as url:
        server.url = f"{url}/v1"
        yield server
