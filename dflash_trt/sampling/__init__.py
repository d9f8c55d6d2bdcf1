"""How tokens are chosen from logits: parameters, noise, the choice itself, acceptance of drafts."""
