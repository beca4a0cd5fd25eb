"""The names of `replica_engine.pjrt.plan` until 0.3, for one release more."""

import sys

from replica_engine.pjrt import plan

sys.modules[f"{__name__}.plan"] = plan
