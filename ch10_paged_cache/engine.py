"""Makes this chapter's engine importable: `from ch10_paged_cache.engine import PagedEngine`."""

from pathlib import Path

from shared.loader import load_script

_script = load_script(Path(__file__).with_name("04_engine.py"))


PagedCache = _script.PagedCache
PagedConfig = _script.PagedConfig
PagedEngine = _script.PagedEngine
PagedPlan = _script.PagedPlan
