"""Chapter 9's server: the same app around another engine.

uvicorn 05_server:app --port 8009
"""

from ch09_async_scheduling.engine import AsyncEngine
from shared.server import make_app

engine = AsyncEngine()
app = make_app(engine)
