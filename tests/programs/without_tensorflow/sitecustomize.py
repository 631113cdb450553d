"""On PYTHONPATH: a process in which TensorFlow is not installed, as far as any import can tell."""

import sys

sys.modules["tensorflow"] = None  # type: ignore[assignment]
