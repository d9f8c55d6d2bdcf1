"""The demo pair's recipe: corpus, tokenizer, target, draft and their evaluation.

Needs the `train` extra. Not in the wheel: run it from the checkout.
"""
