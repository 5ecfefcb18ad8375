"""Makes this chapter's engine importable: `from ch01_baseline.engine import BaselineEngine`."""

from pathlib import Path

from shared.loader import load_script

BaselineEngine = load_script(Path(__file__).with_name("04_engine.py")).BaselineEngine
