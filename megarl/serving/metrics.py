"""Prometheus metrics of the server, in a registry of their own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 60)


class ServerMetrics:
    """Counters, gauges and histograms; times are in seconds. Labels take few values, none from a client's text."""

    def __init__(self):
        registry = self.registry = CollectorRegistry(auto_describe=True)
        self.requests = Counter(
            "megarl_requests", "HTTP requests by endpoint and status", ["endpoint", "status"], registry=registry
        )
        self.generated_tokens = Counter("megarl_generated_tokens", "Generated tokens", registry=registry)
        self.prompt_tokens = Counter("megarl_prompt_tokens", "Tokens of the prompts to generate", registry=registry)
        self.first_token = Histogram(
            "megarl_time_to_first_token_seconds", "From request to token", buckets=_FIRST, registry=registry
        )
        self.between_tokens = Histogram(
            "megarl_time_between_tokens_seconds", "Between the tokens of a request", buckets=_BETWEEN, registry=registry
        )
        self.running = Gauge("megarl_running_requests", "Requests that a replica has", ["replica"], registry=registry)
        self.waiting = Gauge("megarl_waiting_requests", "Requests that no replica has taken", registry=registry)
        self.free_blocks = Gauge("megarl_free_cache_blocks", "Free blocks of the cache", ["replica"], registry=registry)
        self.version = Gauge("megarl_policy_version", "Version of the policy", ["replica"], registry=registry)
