"""What the ranks of ``python -m bench.membership`` report: four 64-bit words per rank in a shared file.

They are the last epoch that the rank found revoked, and when; the last epoch in which it committed a step, and when it first
did. Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import struct

SLOT = struct.Struct("QQQQ")
