"""Makes this chapter's engine importable: `from ch09_async_scheduling.engine import AsyncEngine`."""

from pathlib import Path

from shared.loader import load_script

_script = load_script(Path(__file__).with_name("04_engine.py"))

AsyncConfig = _script.AsyncConfig
AsyncEngine = _script.AsyncEngine
