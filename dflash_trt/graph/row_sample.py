"""`dflash::row_sample`: the choice of sampling/choice.py as an operation over rows of logits.

ONNX Runtime runs this body in tests; engines, which have no float64, a kernel of that name. It
repeats NumPy's `choose_tokens` on purpose: tests hold graphs and the kernel to both.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from dflash_trt.graph.functions import define

_ROUNDS = 10

# Shapes: rows [B,R], columns of them [B,R,1], their tokens [B,R,V], sequences [B,1,1], and
# Philox's words for Q = V / 4 quads of tokens, rounded up.
_ROW_SAMPLE = """
row_sample (logits, positions, sampling) => (token_ids)
{{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    last_axis = Constant <value_ints = [2]> ()
    sequence_axes = Constant <value_ints = [1, 2]> ()

    wide = Cast <to = 1> (logits)
    is_nan = IsNaN (wide)
    is_infinite = IsInf <detect_negative = 0> (wide)
    is_strange = Or (is_nan, is_infinite)
    nothing = Constant <value_float = 0.0> ()
    clean = Where (is_strange, nothing, wide)
    highest = ReduceMax <keepdims = 1> (clean, last_axis)
    lowest = Constant <value_float = -inf> ()
    is_above = Greater (highest, lowest)
    strange = Cast <to = 6> (is_strange)
    strangest = ReduceMax <keepdims = 1> (strange, last_axis)
    is_strange_row = Cast <to = 9> (strangest)
    is_plain_row = Not (is_strange_row)
    is_number_column = And (is_above, is_plain_row)
    is_number = Squeeze (is_number_column, last_axis)
    greedy = ArgMax <axis = 2, keepdims = 0> (clean)

    columns = Constant <value_ints = [1, 1, 1, 1]> ()
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
    last = Constant <value_ints = [-1]> ()
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
    word = Cast <to = 11> (words)
    half_float = Constant <value_float = 0.5> ()
    half = Cast <to = 11> (half_float)
    centre = Add (word, half)
    step_float = Constant <value_float = 2.3283064365386963e-10> ()
    step = Cast <to = 11> (step_float)
    uniform = Mul (centre, step)
    log_uniform = Log (uniform)
    exponential = Neg (log_uniform)
    log_exponential = Log (exponential)
    noise = Neg (log_exponential)
    noisy = Add (scaled, noise)
    never = Cast <to = 11> (lowest)
    score = Where (is_allowed, noisy, never)
    drawn = ArgMax <axis = 2, keepdims = 0> (score)

    is_greedy_row = Squeeze (is_greedy, last_axis)
    choice = Where (is_greedy_row, greedy, drawn)
    none = Constant <value_int = -1> ()
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
    position = Cast <to = 13> (position_column)
    round_up = Constant <value_int = 3> ()
    padded_vocabulary = Add (vocabulary, round_up)
    four = Constant <value_int = 4> ()
    quad_count = Div (padded_vocabulary, four)
    quad_range = Range (zero, quad_count, one)
    c0_0 = Cast <to = 13> (quad_range)
    c1_0 = BitwiseAnd (position, low)
    c2_0 = BitShift <direction = "RIGHT"> (position, word_bits)
    c3_0 = Cast <to = 13> (zero)
    k0_0 = BitwiseAnd (seed, low)
    k1_0 = BitShift <direction = "RIGHT"> (seed, word_bits)"""

# One round of Philox4x32 in uint64, which holds the product of two words.
_ROUND = """
    p0_{i} = Mul (c0_{i}, multiplier_0)
    p1_{i} = Mul (c2_{i}, multiplier_1)
    h0_{i} = BitShift <direction = "RIGHT"> (p0_{i}, word_bits)
    h1_{i} = BitShift <direction = "RIGHT"> (p1_{i}, word_bits)
    x0_{i} = BitwiseXor (h1_{i}, c1_{i})
    x2_{i} = BitwiseXor (h0_{i}, c3_{i})
    c0_{j} = BitwiseXor (x0_{i}, k0_{i})
    c1_{j} = BitwiseAnd (p1_{i}, low)
    c2_{j} = BitwiseXor (x2_{i}, k1_{i})
    c3_{j} = BitwiseAnd (p0_{i}, low)
    s0_{i} = Add (k0_{i}, key_step_0)
    s1_{i} = Add (k1_{i}, key_step_1)
    k0_{j} = BitwiseAnd (s0_{i}, low)
    k1_{j} = BitwiseAnd (s1_{i}, low)"""

# Words [B,R,Q,4] in the order of token ids, cut to the vocabulary.
_LAST_WORDS = """
    word_axis = Constant <value_ints = [3]> ()
    w0 = Unsqueeze (c0_{n}, word_axis)
    w1 = Unsqueeze (c1_{n}, word_axis)
    w2 = Unsqueeze (c2_{n}, word_axis)
    w3 = Unsqueeze (c3_{n}, word_axis)
    quads = Concat <axis = 3> (w0, w1, w2, w3)
    in_a_row = Constant <value_ints = [0, 0, -1]> ()
    all_words = Reshape (quads, in_a_row)
    from_first = Constant <value_ints = [0]> ()
    words = Slice (all_words, from_first, vocabulary_shape, last_axis)"""

_UINT64 = {
    "low": 0xFFFFFFFF,
    "word_bits": 32,
    "multiplier_0": 0xD2511F53,
    "multiplier_1": 0xCD9E8D57,
    "key_step_0": 0x9E3779B9,
    "key_step_1": 0xBB67AE85,
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
    rounds = "".join(_ROUND.format(i=i, j=i + 1) for i in range(_ROUNDS))
    text = _ROW_SAMPLE.format(
        temperature=_DECODE.format(name="temperature"),
        top_p=_DECODE.format(name="top_p"),
        words=_FIRST_WORDS + rounds + _LAST_WORDS.format(n=_ROUNDS),
    )
    constants = {name: np.array(value, np.uint64) for name, value in _UINT64.items()}
    constants["powers"] = np.ldexp(1.0, np.maximum(np.arange(0x7FF), 1) - 1075)
    return define(text, {name: numpy_helper.from_array(one) for name, one in constants.items()})
