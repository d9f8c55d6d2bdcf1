"""`dflash::kv_cache_update`: a layer's new K and V rows into its paged or FP8 caches."""
