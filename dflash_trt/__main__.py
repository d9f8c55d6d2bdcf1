"""`python -m dflash_trt` is `dflash-trt`."""

from __future__ import annotations

import sys

from dflash_trt.cli.main import main

sys.exit(main())
