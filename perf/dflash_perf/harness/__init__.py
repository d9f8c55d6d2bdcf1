"""Load against served models, and what it measures: requests → records → runs → points."""
