"""`dflash::accept`: how much of a drafted block the target keeps."""
