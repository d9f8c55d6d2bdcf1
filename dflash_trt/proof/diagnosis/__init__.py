"""Why is acceptance low? One thing is changed at a time, and the answers are replayed."""
