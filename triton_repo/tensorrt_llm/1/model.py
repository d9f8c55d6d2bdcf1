"""The model `tensorrt_llm`; its code is dflash-trt's, its bundle lies beside this file."""

import os
import sys

# The Python backend runs its interpreter isolated, which then does not look at PYTHONPATH.
sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

from dflash_trt.serving.server.llm_model import TritonPythonModel  # noqa: E402, F401
