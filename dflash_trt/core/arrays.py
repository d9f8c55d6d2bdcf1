"""The array types that many packages speak of."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
