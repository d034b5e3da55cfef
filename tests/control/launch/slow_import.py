"""A module that takes longer to import than any test waits."""

import time

time.sleep(3600)
