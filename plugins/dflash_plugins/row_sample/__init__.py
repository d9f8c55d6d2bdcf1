"""`dflash::row_sample`: the target's token for each row of logits."""
