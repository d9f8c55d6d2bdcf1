"""The demo pair's recipe: corpus, tokenizer, target, draft and their evaluation.

Needs the `train` extra (torch, transformers, tokenizers, nvidia-modelopt); nothing else in
dflash_trt imports this package.
"""
