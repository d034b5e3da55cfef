"""The events of a server over HTTP as they happen. A connection that was cut is made anew, from the last line on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from urllib.parse import quote

from eep.console.api_client import ApiClient, ApiError

SILENT_FOR_S = 60.0
"""A server says something every 15 s."""
FIRST_WAIT_S, LONGEST_WAIT_S, MOST_TRIES = 0.5, 8.0, 12
"""How long it waits between tries, and how many fail in a row before it gives up."""
_TRY_AGAIN = (429, 502, 503, 504)


def follow_events(api: ApiClient, notice: Callable[[str], None]) -> Iterator[str]:
    """The lines of the log. ``notice`` gets the reason, once, when there is no answer any more. Raises what the last try
    raised; of a server that never answered, what the first one did."""
    last, failed, has_answered = "", 0, False
    while True:
        error: OSError | ApiError = ConnectionError(f"{api.url} has ended the stream of events")
        ident = last
        try:
            for text in api.lines(f"/eep/events?after={quote(last)}", SILENT_FOR_S):
                failed, has_answered = 0, True
                if text.startswith("id: "):
                    ident = text[4:]
                elif text.startswith("data: "):
                    last = ident
                    yield text[6:]
        except (OSError, ApiError) as raised:
            error = raised
        failed += 1
        if not has_answered or failed > MOST_TRIES or (isinstance(error, ApiError) and error.status not in _TRY_AGAIN):
            raise error
        if failed == 1:
            notice(f"{error}; asking again for what follows")
        time.sleep(min(FIRST_WAIT_S * 2 ** (failed - 1), LONGEST_WAIT_S))
