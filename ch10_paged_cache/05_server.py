"""Chapter 10's server: the same app around another engine.

uvicorn 05_server:app --port 8010
"""

from ch10_paged_cache.engine import PagedEngine
from shared.server import make_app

engine = PagedEngine()
app = make_app(engine)
