"""How long a kernel should take, on paper: python -m dflash_plugins.roofline.

The formula is in model.py, its constants with their sources in constants.yaml, its errors on what
others have measured in published.yaml. docs/design/roofline.md explains all three.
"""
