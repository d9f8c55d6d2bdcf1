"""`dflash::gated_delta_step`: a Gated DeltaNet layer between its projections and its norm."""
