"""launch/ is a folder of programs, not a package: its tests import them by the folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
