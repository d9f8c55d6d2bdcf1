"""Figures of a worker for Prometheus, beside Dynamo's own on the same page.

They are those that a Triton server shows (`serving/server/metrics.py`), which only knows that
server's two calls for them; here prometheus_client has them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class PrometheusFamilies:
    """Stands for Triton server's `triton_python_backend_utils` where figures are made.

    Args:
        client: the module prometheus_client.
        registry: what Dynamo reads.
    """

    def __init__(self, client: Any, registry: Any) -> None:
        class MetricFamily(_Family):
            def __init__(self, name: str, description: str, kind: str) -> None:
                super().__init__(getattr(client, kind), registry, name, description)

        self.MetricFamily = MetricFamily


class _Family:
    COUNTER, GAUGE, HISTOGRAM = "Counter", "Gauge", "Histogram"

    def __init__(self, make: Any, registry: Any, name: str, description: str) -> None:
        self._make, self._registry = make, registry
        self._name, self._description = name, description
        self._made: Any = None

    def Metric(self, labels: dict[str, str], **more: Any) -> Any:  # noqa: N802  # the server's name
        """The figure with these labels, whose names are the same for all of a family."""
        if self._made is None:
            given = (self._name, self._description, [*labels])
            self._made = self._make(*given, registry=self._registry, **more)
        child = self._made.labels(**labels)
        names = {"increment": "inc", "set": "set", "observe": "observe"}
        known = {own: getattr(child, name, None) for own, name in names.items()}
        return SimpleNamespace(**known)
