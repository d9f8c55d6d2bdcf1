"""A load generator for served models; results go from request records to runs to points."""
