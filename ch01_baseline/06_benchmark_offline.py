"""Measure chapter 1's engine in this process: one request at a time, and batches, which it also runs one by one.

Against 06_benchmark_online.py it shows what HTTP costs: next to nothing here.

    python 06_benchmark_offline.py [--help] -> BaselineEngine -> table, results/ch01_baseline-offline.json
"""

from pathlib import Path

from ch01_baseline.engine import BaselineEngine
from shared.benchmark import offline
from shared.workload import WorkloadConfig

CONFIG = WorkloadConfig(requests=4, prompt_tokens=16, output_tokens=8)

if __name__ == "__main__":
    offline(Path(__file__).resolve().parent, BaselineEngine, CONFIG, batch_sizes=(1, 2, 4))
