"""Chapter 11's server: the same app around another engine.

uvicorn 05_server:app --port 8011
"""

from ch11_quant_tp.engine import Engine
from shared.server import make_app

engine = Engine()
app = make_app(engine)
