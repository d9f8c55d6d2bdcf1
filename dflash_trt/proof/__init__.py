"""Evidence that a bundle is right: verification, comparison with a twin, checks of machines."""
