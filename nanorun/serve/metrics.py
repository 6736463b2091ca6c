"""Counters and latency histograms since the start, in Prometheus' text format.

Only the event loop writes them. A histogram counts, for each bound, the values up to it.
"""

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds, self._counts = bounds, [0] * (len(bounds) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> Iterator[str]:
        cumulative = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            cumulative += count
            yield f'{name}_bucket{{le="{bound}"}} {cumulative}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {cumulative}"


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.open_requests = self.connections = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.disconnects = self.dropped_connections = 0
        self.first_token = Histogram()
        self.duration = Histogram()

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """`gauges`: name to help text and current value."""
        lines = _header("nanorun_requests_total", "counter", "Requests answered, by path and status.")
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'nanorun_requests_total{{path="{path}",status="{status}"}} {count}')
        for name, help_text, total in (
            ("prompt_tokens", "Tokens of prompts.", self.prompt_tokens),
            ("cached_tokens", "Tokens of prompts found in the KV cache.", self.cached_tokens),
            ("completion_tokens", "Tokens sampled from the model.", self.completion_tokens),
            ("disconnects", "Requests whose client disconnected before the end.", self.disconnects),
            ("dropped_connections", "Connections closed for waiting too long.", self.dropped_connections),
        ):
            lines += _header(f"nanorun_{name}_total", "counter", help_text)
            lines.append(f"nanorun_{name}_total {total}")
        every_gauge = {
            "nanorun_connections": ("Open connections.", float(self.connections)),
            "nanorun_open_requests": ("Requests in progress.", float(self.open_requests)),
            **gauges,
            "process_resident_memory_bytes": ("Memory of this process.", resident_bytes()),
        }
        for name, (help_text, value) in every_gauge.items():
            lines += _header(name, "gauge", help_text)
            lines.append(f"{name} {value:g}" if value < 1e6 else f"{name} {value:.0f}")
        for name, help_text, histogram in (
            ("nanorun_first_token_seconds", "From a request to its first token.", self.first_token),
            ("nanorun_request_seconds", "From a request to the end of its answer.", self.duration),
        ):
            lines += [*_header(name, "histogram", help_text), *histogram.lines(name)]
        return "\n".join(lines) + "\n"


def _header(name: str, kind: str, help_text: str) -> list[str]:
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]


def resident_bytes(pid: int | str = "self") -> float:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux, or the process is gone
        return 0
