"""What engines with our kernels and those who run them must agree on, as one number."""

from __future__ import annotations

PLUGIN_INTERFACE = 1
"""One more whenever a plugin has other operands, or the same ones mean something else.

An engine keeps the kernels that it was built with, and TensorRT calls every plugin's version "1".
So neither would notice that the host now packs `sampling`, lays out a cache or draws noise in
another way. A bundle's manifest has the number that its engines were built with.
"""
