"""`dflash::kv_feature_injection`: writes the target's features into a draft layer's KV cache."""
