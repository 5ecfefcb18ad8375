"""Chapter 5's server: the same app around another engine.

uvicorn 05_server:app --port 8005
"""

from ch05_kv_cache.engine import KVCacheEngine
from shared.server import make_app

engine = KVCacheEngine()
app = make_app(engine)
