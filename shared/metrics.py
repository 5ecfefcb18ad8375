"""What /metrics shows, in Prometheus' text format.

It counts requests, tokens and times as the server sees them, and asks the engine for its state when it is read.

    Generation -> counters, histograms \\
    engine.stats() -> gauges ---------> render -> text
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.engine import EngineStats

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
OUTCOMES = ("stop", "length", "aborted", "error", "rejected")


class _EngineCollector(Collector):
    """The engine's own numbers, read at the moment of the scrape. What an engine doesn't have is left out."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield GaugeMetricFamily("engine_requests_running", "Requests being computed", stats.running)
        yield GaugeMetricFamily("engine_requests_waiting", "Requests in the queue", stats.waiting)
        if stats.kv_blocks_total is not None:
            yield GaugeMetricFamily("engine_kv_blocks_used", "KV cache blocks in use", stats.kv_blocks_used)
            yield GaugeMetricFamily("engine_kv_blocks_total", "KV cache blocks", stats.kv_blocks_total)
        if stats.prefix_cache_hit_tokens is not None:
            yield CounterMetricFamily(
                "engine_prefix_cache_hit_tokens", "Prompt tokens found in the cache", stats.prefix_cache_hit_tokens
            )
        if stats.preemptions is not None:
            yield CounterMetricFamily("engine_preemptions", "Requests put back into the queue", stats.preemptions)


class ServerMetrics:
    """The metrics of one app, in a registry of its own, so that two apps in one process don't mix."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self.requests = Counter(
            "engine_requests",
            "Choices by outcome; rejected: not taken into the queue",
            ["outcome"],
            registry=self._registry,
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome)  # shown as 0 from the start
        self.prompt_tokens = self._counter("engine_prompt_tokens", "Prompt tokens computed or found in the cache")
        self.generation_tokens = self._counter("engine_generation_tokens", "Tokens generated")
        self.ttft = self._histogram("engine_ttft_seconds", "Time from a request's submission to its first token")
        self.tpot = self._histogram("engine_tpot_seconds", "Time per output token, without the first")
        self.e2e = self._histogram("engine_e2e_seconds", "Time from a request's submission to its end")
        self.step = self._histogram("engine_step_seconds", "Time of one step of the engine")

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=SECONDS, registry=self._registry)

    def render(self) -> bytes:
        return generate_latest(self._registry)
