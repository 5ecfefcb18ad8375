"""Measure chapter 11's server over HTTP: a batch, closed loops and realistic traffic.

python 06_benchmark_online.py [--help] -> 05_server.py as a process -> table, results/ch11_quant_tp-online.json
"""

from pathlib import Path

from shared.benchmark import online
from shared.workload import WorkloadConfig

CONFIG = WorkloadConfig(requests=32, concurrency=(1, 4, 16), prompt_tokens=64, output_tokens=32, rate=1.0)

if __name__ == "__main__":
    online(Path(__file__).resolve().parent, CONFIG)
