"""Nothing enters; what a child process measured leaves. The probe starts MPI, which doctor itself does not, alone."""

import json
from typing import Any, cast

from mpidp.tools.doctor.child import Child

MODULE = "mpidp.tools.doctor.probe"
PROBE_TIMEOUT_S = 120.0


def probe_alone() -> dict[str, Any]:
    """Run the probe as a world of one."""
    answer = Child(MODULE).answer(PROBE_TIMEOUT_S)
    return cast(dict[str, Any], json.loads(answer.line)) if answer.line else {"error": answer.error}
