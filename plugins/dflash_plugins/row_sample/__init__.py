"""`dflash::row_sample`: samples the target's token of each row of logits."""
