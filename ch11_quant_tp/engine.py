"""Makes this chapter's engine importable: `from ch11_quant_tp.engine import Engine`."""

from pathlib import Path

from shared.loader import load_script

_script = load_script(Path(__file__).with_name("04_engine.py"))

Engine = _script.Engine
FullConfig = _script.FullConfig
Int8Cache = _script.Int8Cache
make_cache = _script.make_cache
make_model = _script.make_model
