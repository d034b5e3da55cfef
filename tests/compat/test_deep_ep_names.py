"""The small names of DeepEP's interface: events, streams, settings."""

from __future__ import annotations

import pytest
import torch

import eep
from eep.compat import deep_ep
from eep.compat.deep_ep import Buffer, Config, EventHandle, EventOverlap


def test_an_event_is_waited_for_at_the_end_of_its_block() -> None:
    event, waits = Buffer.capture(), []
    assert isinstance(event, EventOverlap)
    assert isinstance(event.event, EventHandle)
    event.event.current_stream_wait = lambda: waits.append("wait")  # type: ignore[method-assign]
    with event:
        assert waits == []
    assert waits == ["wait"]
    with event(release_handle=True) as entered:
        assert entered is event
    assert waits == ["wait", "wait"]
    assert event.event is None
    with event:  # nothing to wait for
        pass
    assert EventOverlap().event is None
    with pytest.raises(ValueError, match="no event"):
        EventOverlap().current_stream_wait()


def test_a_hook_runs_once_after_the_wait() -> None:
    event = EventOverlap(EventHandle(), (torch.zeros(1),))
    event.register_hook_after_wait(lambda: "sorted")
    with pytest.raises(ValueError, match="a hook already"):
        event.register_hook_after_wait(lambda: None)
    assert event.wait() == "sorted"
    assert event.current_stream_wait() is None


def test_settings_of_normal_mode_are_kept() -> None:
    config = Config(24, 8, 256)
    assert (config.num_sms, config.num_max_nvl_chunked_send_tokens) == (24, 8)
    assert config.get_nvl_buffer_size_hint(14336, 8) == config.get_rdma_buffer_size_hint(14336, 8) == 0
    assert isinstance(Buffer.get_dispatch_config(8), Config)
    Buffer.set_num_sms(26)
    assert Buffer.num_sms == Buffer.get_combine_config(4).num_sms == 26
    with pytest.raises(ValueError, match="even"):
        Buffer.set_num_sms(3)
    with pytest.raises(ValueError, match="negative"):
        Config(-1)
    Buffer.set_num_sms(20)


def test_what_kind_of_build_it_is(rendezvous: eep.Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"EEP_RENDEZVOUS": str(rendezvous.path), "EEP_RANK": "0", "EEP_WORLD_SIZE": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert deep_ep.topk_idx_t is torch.int64
    assert Buffer.is_sm90_compiled()
    stream = Buffer(None).get_comm_stream()
    assert isinstance(stream, torch.cuda.Stream if torch.cuda.is_available() else torch.cpu.Stream)
