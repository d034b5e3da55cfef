"""What the ranks of ``python -m bench.membership`` tell it: four 64-bit words per rank in a shared file.

The last epoch that the rank found revoked and when; the last epoch in which it has committed a step and when it first
did. Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import struct

SLOT = struct.Struct("QQQQ")
