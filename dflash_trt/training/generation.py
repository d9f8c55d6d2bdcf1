"""Continuations by the target alone, many rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_trt.training.extras import training_module

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


def continue_rows(
    target: Qwen3ForCausalLM,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Each prompt with `new_tokens` of the target's own tokens after it.

    Rows of unequal prompts run together: a row that is still inside its prompt is fed the
    prompt's next token instead of the chosen one. The end token does not stop a row.

    Args:
        temperature: 0 takes the likeliest token, else the softmax of logits / temperature.
    """
    torch = training_module("torch")
    cache_type = training_module("transformers").StaticCache
    generator = torch.Generator().manual_seed(seed)
    rows = [list(prompt) for prompt in prompts]
    lengths = [len(prompt) + new_tokens for prompt in prompts]
    start, end = min(map(len, rows)), max(lengths)
    cache = cache_type(config=target.config, max_cache_len=end)
    fed = torch.tensor([row[:start] for row in rows])
    out = [row[:start] for row in rows]
    with torch.no_grad():
        for position in range(start, end):
            logits = target(
                input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits[:, -1]
            if temperature > 0:
                weights = (logits / temperature).softmax(dim=-1)
                chosen = torch.multinomial(weights, 1, generator=generator)[:, 0].tolist()
            else:
                chosen = logits.argmax(dim=-1).tolist()
            for row, done, token in zip(rows, out, chosen, strict=True):
                done.append(row[position] if position < len(row) else token)
            fed = torch.tensor([[done[-1]] for done in out])
    return [done[:length] for done, length in zip(out, lengths, strict=True)]
