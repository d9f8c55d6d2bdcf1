"""The model `ensemble`, which forwards to `tensorrt_llm`; its code is dflash-trt's."""

import os
import sys

# The Python backend runs its interpreter isolated, which then does not look at PYTHONPATH.
sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

from dflash_trt.serving.server.ensemble_model import TritonPythonModel  # noqa: E402, F401
