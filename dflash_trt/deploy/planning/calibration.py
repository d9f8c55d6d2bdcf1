"""A few parameters that say how far real engines stay below their GPU's data sheet."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from dflash_trt.core.yaml_files import read_yaml

CALIBRATION_FILE = Path(__file__).with_name("calibration.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The model's parameters.

    Args:
        bandwidth_fraction: of a data sheet's memory bandwidth that decoding reaches.
        flops_fraction: of its dense FLOP/s that decoding reaches.
        layer_overhead_us: of a layer, besides bytes and FLOPs: kernels that wait for each other.
        step_overhead_us: of a speculative step, between passes: acceptance, sampling, the host.
        collective_us: latency of one collective between GPUs, whatever its size.
        link_fraction: of a link's bandwidth that collectives reach.
    """

    bandwidth_fraction: float
    flops_fraction: float
    layer_overhead_us: float
    step_overhead_us: float
    collective_us: float
    link_fraction: float

    def scaled(self, name: str, factor: float) -> Calibration:
        """The same with one parameter multiplied; a fraction never exceeds 1."""
        value = getattr(self, name) * factor
        return replace(self, **{name: min(value, 1.0) if name.endswith("_fraction") else value})


PARAMETERS = tuple(field.name for field in fields(Calibration))


@dataclass(frozen=True, slots=True)
class ProjectionAccuracy:
    """Relative errors of the model on a published table, and whether it was fitted to it.

    They are None where the model has no figure to compare; `note` says why.
    """

    table: str
    fitted: bool
    median: float | None
    worst: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class StoredCalibration:
    """The parameters that ship with the project, how each was found, and by which command."""

    parameters: Calibration
    origin: dict[str, str]
    accuracy: tuple[ProjectionAccuracy, ...]
    fitted_by: str


def read_calibration() -> StoredCalibration:
    """The parameters that the project was calibrated to."""
    raw = read_yaml(CALIBRATION_FILE)
    parameters = raw["parameters"].items()
    return StoredCalibration(
        parameters=Calibration(**{name: one["value"] for name, one in parameters}),
        origin={name: one["origin"] for name, one in parameters},
        accuracy=tuple(ProjectionAccuracy(**one) for one in raw["accuracy"]),
        fitted_by=raw["fitted_by"],
    )
