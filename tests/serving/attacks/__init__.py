"""Attacks on a served pair: each has one clear ending, and soon."""

from tests.serving.attacks import fields, grpc, http  # noqa: F401  # they fill the table
from tests.serving.attacks.table import ATTACKS, Attack, Target, check

__all__ = ["ATTACKS", "Attack", "Target", "check"]
