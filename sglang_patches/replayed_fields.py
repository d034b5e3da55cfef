"""What the front end tells a rank about a request that another rank has served, in the request's ``custom_params``."""

from __future__ import annotations

DELIVERED = "eep_delivered"
"""The tokens that the client has."""
LOST_LIFE = "eep_lost_life"
"""The rank and incarnation that served it last, and the wire id that it had there."""
