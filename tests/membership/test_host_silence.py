"""When a host is taken for lost, and until when one may rely on being heard."""

from __future__ import annotations

import math

from eep.membership import HostSilence, ReadReport, after_silence, must_write, relied_on_until
from eep.membership.host_silence import LOOKS, RELIED_ON, UNMOVED

TIMEOUT = 10.0
PAUSE = TIMEOUT / LOOKS


def looks(count: int, *, heard: int = 1, version: int = 5, every: float = PAUSE) -> HostSilence:
    seen = None
    for index in range(count):
        seen = after_silence(seen, heard, ReadReport(version, index * every), index * every, TIMEOUT)
    assert seen is not None
    return seen


def test_a_host_that_is_silent_in_both_ways_is_lost_after_the_timeout() -> None:
    assert not looks(LOOKS).is_lost(TIMEOUT)
    assert looks(LOOKS + 1).is_lost(TIMEOUT)


def test_a_message_over_the_link_begins_anew() -> None:
    seen = after_silence(looks(LOOKS + 1), 2, ReadReport(5, 0.0), 11 * PAUSE, TIMEOUT)
    assert seen == HostSilence(2, 11 * PAUSE)
    assert not seen.is_quiet(TIMEOUT)


def test_a_host_whose_report_moves_is_not_lost_however_silent_its_link() -> None:
    seen = looks(100 * LOOKS)
    seen = after_silence(seen, 1, ReadReport(6, 100 * TIMEOUT), 100 * TIMEOUT, TIMEOUT)
    assert seen.is_quiet(TIMEOUT)
    assert not seen.is_lost(TIMEOUT)


def test_a_report_counts_from_the_moment_it_was_read() -> None:
    seen = after_silence(looks(2, version=0), 1, ReadReport(5, 1.25 * PAUSE), 2 * PAUSE, TIMEOUT)
    assert seen.report_s == 0.75 * PAUSE


def test_a_late_look_counts_no_more_for_a_report_than_for_the_link() -> None:
    seen = after_silence(looks(2, version=0), 1, ReadReport(5, 1.25 * PAUSE), 1000 * PAUSE, TIMEOUT)
    assert seen.report_s == 2 * PAUSE


def test_a_host_without_a_report_is_not_lost_again() -> None:
    assert not looks(10 * LOOKS, version=0).is_lost(TIMEOUT)


def test_a_look_after_a_long_pause_does_not_make_the_others_lost() -> None:
    assert not looks(3, every=1000.0).is_lost(TIMEOUT)


def test_a_host_relies_on_being_heard_for_less_time_than_the_others_wait() -> None:
    """What the others see of it is at least as new as the write, or the message, that it counts from."""
    assert relied_on_until(100.0, [90.0, 120.0], TIMEOUT) + PAUSE < 100.0 + UNMOVED * TIMEOUT
    assert relied_on_until(80.0, [90.0, 120.0], TIMEOUT) == 90.0 + RELIED_ON * TIMEOUT


def test_a_host_without_links_relies_on_its_lease_alone() -> None:
    assert relied_on_until(0.0, [], TIMEOUT) == math.inf
    assert not must_write(1000.0, [], TIMEOUT)


def test_a_host_writes_when_one_of_the_others_has_not_confirmed() -> None:
    assert not must_write(100.0, [99.0, 98.5], TIMEOUT)
    assert must_write(100.0, [99.0, 97.5], TIMEOUT)
