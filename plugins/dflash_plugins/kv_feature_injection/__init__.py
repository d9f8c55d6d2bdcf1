"""`dflash::kv_feature_injection`: the target's features become one draft layer's context."""
