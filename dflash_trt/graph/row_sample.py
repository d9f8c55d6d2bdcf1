"""`dflash::row_sample`: the choice of sampling/choice.py as an operation over rows of logits.

ONNX Runtime runs this body in tests; engines, which have no float64, a kernel of that name. It
repeats NumPy's `choose_tokens` on purpose: tests hold graphs and the kernel to both.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from dflash_trt.graph.functions import define
from dflash_trt.sampling.noise import GROUP

_ROUNDS = 10

# Shapes: rows [B,R], columns of them [B,R,1], their tokens [B,R,V], sequences [B,1,1], and
# Philox's words for D = V / 512 pairs of groups of tokens, rounded up, which makes N = 2 D groups.
_ROW_SAMPLE = """
row_sample (logits, positions, sampling) => (token_ids)
{{
    let zero = 0, one = 1, last_axis = [2], sequence_axes = [1, 2]

    wide = Cast <to = 1> (logits)
    is_nan = IsNaN (wide)
    is_infinite = IsInf <detect_negative = 0> (wide)
    is_strange = Or (is_nan, is_infinite)
    let nothing = 0.0
    clean = Where (is_strange, nothing, wide)
    highest = ReduceMax <keepdims = 1> (clean, last_axis)
    let lowest = -inf
    is_above = Greater (highest, lowest)
    strange = Cast <to = 6> (is_strange)
    strangest = ReduceMax <keepdims = 1> (strange, last_axis)
    is_strange_row = Cast <to = 9> (strangest)
    is_plain_row = Not (is_strange_row)
    is_number_column = And (is_above, is_plain_row)
    is_number = Squeeze (is_number_column, last_axis)
    greedy = ArgMax <axis = 2, keepdims = 0> (clean)

    let columns = [1, 1, 1, 1]
    seed_column, temperature_column, top_k_column, top_p_column
        = Split <axis = 1> (sampling, columns)
    seed_bits = Unsqueeze (seed_column, last_axis)
    seed = Cast <to = 13> (seed_bits)
    top_k = Unsqueeze (top_k_column, last_axis)
{temperature}
{top_p}

    vocabulary_shape = Shape <start = 2, end = 3> (logits)
    vocabulary = Squeeze (vocabulary_shape)
    values, ranked = TopK (clean, vocabulary_shape)
    rank = Range (zero, vocabulary, one)
    keeps_all = Equal (top_k, zero)
    kept = Where (keeps_all, vocabulary, top_k)
    is_among_top_k = Less (rank, kept)

    nought = Cast <to = 11> (zero)
    unit = Cast <to = 11> (one)
    is_greedy = Equal (temperature, nought)
    divisor = Where (is_greedy, unit, temperature)
    highest_double = Cast <to = 11> (highest)
    values_double = Cast <to = 11> (values)
    values_behind = Sub (values_double, highest_double)
    values_scaled = Div (values_behind, divisor)
    probability = Exp (values_scaled)
    weight = Where (is_among_top_k, probability, nought)
    weight_before = CumSum <exclusive = 1> (weight, last_axis)
    weight_after = Add (weight_before, weight)
    let last = [-1]
    total = Gather <axis = 2> (weight_after, last)
    wanted = Mul (top_p, total)
    is_before = Less (weight_before, wanted)
    has_no_top_p = GreaterOrEqual (top_p, unit)
    is_in_nucleus = Or (is_before, has_no_top_p)
    is_kept = And (is_among_top_k, is_in_nucleus)
    is_allowed = ScatterElements <axis = 2> (is_kept, ranked, is_kept)

    clean_double = Cast <to = 11> (clean)
    behind = Sub (clean_double, highest_double)
    scaled = Div (behind, divisor)
{words}
    let half_float = 0.5
    half = Cast <to = 11> (half_float)
    let step_float = 2.3283064365386963e-10
    step = Cast <to = 11> (step_float)
{group_log}
{token_log}
    group_size = Cast <to = 11> (group_size_integer)
    group_exponential = Neg (group_log)
    least = Div (group_exponential, group_size)
    excess = Neg (token_log)
    member = BitwiseAnd (group_words, place_mask)
    is_member = Equal (member, places)
    more = Where (is_member, nought, excess)
    group_exponentials = Add (least, more)
    let in_a_row = [0, 0, -1]
    exponentials = Reshape (group_exponentials, in_a_row)
    let from_first = [0]
    exponential = Slice (exponentials, from_first, vocabulary_shape, last_axis)
    log_exponential = Log (exponential)
    noise = Neg (log_exponential)
    noisy = Add (scaled, noise)
    never = Cast <to = 11> (lowest)
    score = Where (is_allowed, noisy, never)
    drawn = ArgMax <axis = 2, keepdims = 0> (score)

    is_greedy_row = Squeeze (is_greedy, last_axis)
    choice = Where (is_greedy_row, greedy, drawn)
    let none = -1
    token_ids = Where (is_number, choice, none)
}}
"""

# A float64 that is not negative, from its bits, which opset 24 cannot reinterpret. `powers` is what
# each exponent scales an integer mantissa by; exponent 0 has no implicit bit.
_DECODE = """
    {name}_bits = Unsqueeze ({name}_column, last_axis)
    {name}_unsigned = Cast <to = 13> ({name}_bits)
    {name}_shifted = BitShift <direction = "RIGHT"> ({name}_unsigned, mantissa_bits)
    {name}_biased = BitwiseAnd ({name}_shifted, exponent_mask)
    {name}_exponent = Cast <to = 7> ({name}_biased)
    {name}_fraction = BitwiseAnd ({name}_unsigned, mantissa_mask)
    {name}_is_normal = Cast <to = 9> ({name}_biased)
    {name}_one = Cast <to = 13> ({name}_is_normal)
    {name}_implicit = BitShift <direction = "LEFT"> ({name}_one, mantissa_bits)
    {name}_integer = BitwiseOr ({name}_fraction, {name}_implicit)
    {name}_mantissa = Cast <to = 11> ({name}_integer)
    {name}_power = Gather (powers, {name}_exponent)
    {name} = Mul ({name}_mantissa, {name}_power)"""

_FIRST_WORDS = """
    position_column = Unsqueeze (positions, last_axis)
    let pair_size = 512, round_up = 511
    padded_vocabulary = Add (vocabulary, round_up)
    pair_count = Div (padded_vocabulary, pair_size)
    pair_end = Add (pair_count, one)
    pair_range = Range (one, pair_end, one)
    c0_0 = Cast <to = 13> (pair_range)
    c1_0 = Cast <to = 13> (position_column)
    c2_0 = Cast <to = 13> (zero)
    c3_0 = Cast <to = 13> (zero)
    k0_0 = Identity (seed)
    k1_0 = Cast <to = 13> (zero)"""

# Both halves of the product of two words, of which a uint64 holds one: by halves of 32 bits.
_PRODUCT = """
    l{c}_{i} = BitwiseAnd (c{c}_{i}, low)
    u{c}_{i} = BitShift <direction = "RIGHT"> (c{c}_{i}, half_word)
    ll{c}_{i} = Mul (l{c}_{i}, multiplier_{c}_low)
    lu{c}_{i} = Mul (l{c}_{i}, multiplier_{c}_high)
    ul{c}_{i} = Mul (u{c}_{i}, multiplier_{c}_low)
    uu{c}_{i} = Mul (u{c}_{i}, multiplier_{c}_high)
    a{c}_{i} = BitShift <direction = "RIGHT"> (ll{c}_{i}, half_word)
    b{c}_{i} = BitwiseAnd (lu{c}_{i}, low)
    n{c}_{i} = Add (a{c}_{i}, b{c}_{i})
    m{c}_{i} = Add (n{c}_{i}, ul{c}_{i})
    d{c}_{i} = BitShift <direction = "RIGHT"> (lu{c}_{i}, half_word)
    e{c}_{i} = BitShift <direction = "RIGHT"> (m{c}_{i}, half_word)
    f{c}_{i} = Add (d{c}_{i}, e{c}_{i})
    h{c}_{i} = Add (uu{c}_{i}, f{c}_{i})"""

# One round of Philox4x64; uint64 wraps.
_ROUND = """{product_0}{product_2}
    x0_{i} = BitwiseXor (h2_{i}, c1_{i})
    x2_{i} = BitwiseXor (h0_{i}, c3_{i})
    c0_{j} = BitwiseXor (x0_{i}, k0_{i})
    c1_{j} = Mul (c2_{i}, multiplier_2)
    c2_{j} = BitwiseXor (x2_{i}, k1_{i})
    c3_{j} = Mul (c0_{i}, multiplier_0)
    k0_{j} = Add (k0_{i}, key_step_0)
    k1_{j} = Add (k1_{i}, key_step_1)"""

# Words [B,R,N,1] of groups, and [B,R,N,256] of their tokens: SplitMix64's outputs.
_LAST_WORDS = """
    let word_axis = [3]
    w0 = Unsqueeze (c0_{n}, word_axis)
    w1 = Unsqueeze (c1_{n}, word_axis)
    w2 = Unsqueeze (c2_{n}, word_axis)
    w3 = Unsqueeze (c3_{n}, word_axis)
    first_words = Concat <axis = 3> (w0, w2)
    second_words = Concat <axis = 3> (w1, w3)
    let one_each = [0, 0, -1, 1]
    group_words = Reshape (first_words, one_each)
    starts = Reshape (second_words, one_each)
    s_0 = Add (starts, place_steps)
    t_0 = BitShift <direction = "RIGHT"> (s_0, mix_shift_0)
    y_0 = BitwiseXor (s_0, t_0)
    s_1 = Mul (y_0, mix_factor_0)
    t_1 = BitShift <direction = "RIGHT"> (s_1, mix_shift_1)
    y_1 = BitwiseXor (s_1, t_1)
    s_2 = Mul (y_1, mix_factor_1)
    t_2 = BitShift <direction = "RIGHT"> (s_2, mix_shift_2)
    token_words = BitwiseXor (s_2, t_2)"""

_LOG = """
    {name}_half = BitShift <direction = "RIGHT"> ({name}_words, half_word)
    {name}_number = Cast <to = 11> ({name}_half)
    {name}_centre = Add ({name}_number, half)
    {name}_uniform = Mul ({name}_centre, step)
    {name}_log = Log ({name}_uniform)"""

_UINT64 = {
    "low": 0xFFFFFFFF,
    "half_word": 32,
    "multiplier_0": 0xD2E7470EE14C6C93,
    "multiplier_0_low": 0xE14C6C93,
    "multiplier_0_high": 0xD2E7470E,
    "multiplier_2": 0xCA5A826395121157,
    "multiplier_2_low": 0x95121157,
    "multiplier_2_high": 0xCA5A8263,
    "key_step_0": 0x9E3779B97F4A7C15,
    "key_step_1": 0xBB67AE8584CAA73B,
    "mix_shift_0": 30,
    "mix_factor_0": 0xBF58476D1CE4E5B9,
    "mix_shift_1": 27,
    "mix_factor_1": 0x94D049BB133111EB,
    "mix_shift_2": 31,
    "place_mask": GROUP - 1,
    "group_size_integer": GROUP,
    "mantissa_bits": 52,
    "mantissa_mask": (1 << 52) - 1,
    "exponent_mask": 0x7FF,
}


def row_sample_function() -> onnx.FunctionProto:
    """`dflash::row_sample`: the target's token for each row of logits.

    logits [B,R,V] of any float type, positions int64 [B,R] that the tokens will take, sampling
    int64 [B,4]: seed, temperature's float64 bits, top_k (0: all), top_p's float64 bits, as
    sampling/params.py packs them. token_ids int64 [B,R]; -1 where a row holds NaN or +inf, or
    nothing but -inf.
    """
    rounds = ""
    for number in range(_ROUNDS):
        products = {f"product_{c}": _PRODUCT.format(c=c, i=number) for c in (0, 2)}
        rounds += _ROUND.format(**products, i=number, j=number + 1)
    text = _ROW_SAMPLE.format(
        temperature=_DECODE.format(name="temperature"),
        top_p=_DECODE.format(name="top_p"),
        words=_FIRST_WORDS + rounds + _LAST_WORDS.format(n=_ROUNDS),
        group_log=_LOG.format(name="group"),
        token_log=_LOG.format(name="token"),
    )
    constants = {name: np.array(value, np.uint64) for name, value in _UINT64.items()}
    places = np.arange(GROUP, dtype=np.uint64)
    constants["places"] = places
    constants["place_steps"] = (places + np.uint64(1)) * np.uint64(_UINT64["key_step_0"])
    constants["powers"] = np.ldexp(1.0, np.maximum(np.arange(0x7FF), 1) - 1075)
    return define(text, {name: numpy_helper.from_array(one) for name, one in constants.items()})
