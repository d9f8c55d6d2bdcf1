"""The noise of dflash_trt/sampling/noise.py in kernels: words of groups of tokens, exponentials.

Exact noise needs float64 logarithms, slow on most GPUs. So a float32 estimate finds candidates
first: those within MARGIN of the best include the winner.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(256)  # noise.GROUP
MARGIN = tl.constexpr(0.01)


@triton.jit
def group_words(seed, position, group):
    """x and k (uint64) of groups of tokens; a call of Philox has those of two."""
    counter = (group // 2 + 1).to(tl.uint64)
    zero = tl.zeros_like(counter)
    w0, w1, w2, w3 = tl.philox(seed, counter, position.to(tl.uint64) + zero, zero, zero)
    is_first = group % 2 == 0
    return tl.where(is_first, w0, w2), tl.where(is_first, w1, w3)


@triton.jit
def group_bound(seed, position, group):
    """Above the noise of all tokens of groups, but for MARGIN / 4."""
    words, _ = group_words(seed, position, group)
    return -tl.log(estimate_exponential(words) * (1.0 / GROUP))


@triton.jit
def token_words(k, place):
    """The outputs of SplitMix64 (uint64) for places in a group, which starts it from k."""
    word = k + (place + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def estimate_exponential(word):
    """-log(u(word)) in float32, within MARGIN / 4 of itself."""
    # float32 cannot hold u near 1, but d = 1 - u: -log(1 - d) = d (1 + d/2 …).
    upper = (word >> 32).to(tl.uint32)
    rest = ((~upper).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    near_one = rest * (1.0 + 0.5 * rest)
    uniform = (upper.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.where(rest < 0.002, near_one, -tl.log(tl.minimum(uniform, 0.999)))


@triton.jit
def exponential(word):
    """-log(u(word)) in float64."""
    return -tl.log(((word >> 32).to(tl.float64) + 0.5) * 2.3283064365386963e-10)
