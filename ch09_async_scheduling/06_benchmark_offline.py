"""Measure chapter 9's engine in this process; `--peer transformers` measures transformers' own cache beside it.

python 06_benchmark_offline.py [--help] -> AsyncEngine -> table, results/ch09_async_scheduling-offline.json
"""

from pathlib import Path

from ch09_async_scheduling.engine import AsyncEngine
from shared.benchmark import offline
from shared.workload import WorkloadConfig

CONFIG = WorkloadConfig(requests=16, prompt_tokens=64, output_tokens=32)

if __name__ == "__main__":
    offline(Path(__file__).resolve().parent, AsyncEngine, CONFIG, batch_sizes=(1, 8, 32))
