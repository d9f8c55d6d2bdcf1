"""What a model's linears read on calibration text: the ranges that activations are quantised in."""

from __future__ import annotations

from dflash_trt.building.observing.observe import ActivationAmax, observe_pair, observe_target

__all__ = ["ActivationAmax", "observe_pair", "observe_target"]
