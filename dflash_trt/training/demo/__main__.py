"""`python -m dflash_trt.training.demo`: see `make.py`."""

import sys

from dflash_trt.training.demo.make import main

sys.exit(main())
