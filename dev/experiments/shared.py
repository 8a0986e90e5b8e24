"""What the experiments have in common with dev/benchmarks: the repository's folder, and the machine of a record."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from job import ROOT, machine

__all__ = ["ROOT", "machine"]
