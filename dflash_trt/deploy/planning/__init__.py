"""What a pair needs of a GPU, from first principles: bytes, FLOPs, and the time they take."""
