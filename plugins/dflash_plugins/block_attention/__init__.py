"""Attention of a block's query rows over a linear or paged KV cache, as flash-decoding."""
