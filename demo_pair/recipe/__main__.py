"""`python -m demo_pair.recipe`: see `make.py`."""

import sys

try:
    from demo_pair.recipe.make import main
except ImportError as error:
    sys.exit(f"error: {error}; pip install 'dflash-trt[train]'")

sys.exit(main())
