"""How much of a drafted block is kept, and which block pays at which batch."""
