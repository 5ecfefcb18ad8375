"""Makes this chapter's engine importable: `from ch05_kv_cache.engine import KVCacheEngine`."""

from pathlib import Path

from shared.loader import load_script

_script = load_script(Path(__file__).with_name("04_engine.py"))

KVCache = _script.KVCache
KVCacheConfig = _script.KVCacheConfig
KVCacheEngine = _script.KVCacheEngine
TimedSequence = _script.TimedSequence
