"""What this project's GPU kernels can do, as data and arithmetic that graphs and builders ask.

The kernels themselves, and how they are launched, are in `dflash_plugins`, which imports this.
"""
