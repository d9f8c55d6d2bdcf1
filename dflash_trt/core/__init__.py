"""What every package stands on: records on disk, published folders, progress."""
