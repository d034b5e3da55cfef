"""The small names of DeepEP's interface: events, streams, settings."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import eep
from eep.compat import deep_ep
from eep.compat.deep_ep import Buffer, Config, ElasticBuffer, EventHandle, EventOverlap
from eep.compat.deep_ep.utils import event
from tests.compat.deep_ep_ranks import Fleet, raises


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


def test_events_are_where_programs_import_them_from() -> None:
    assert deep_ep.utils.EventOverlap is event.EventOverlap is EventOverlap
    assert deep_ep.utils.EventHandle is event.EventHandle is EventHandle


def play_keeps_its_buffer(group: dist.ProcessGroup) -> None:
    """A program makes its buffer at the first layer and asks at each later one whether it still fits."""
    made: list[Buffer] = []

    def buffer_for(num_nvl_bytes: int, num_rdma_bytes: int, low_latency_mode: bool = False) -> Buffer:
        last = made[-1] if made else None
        if (
            last is None
            or last.group != group
            or last.num_nvl_bytes < num_nvl_bytes
            or last.num_rdma_bytes < num_rdma_bytes
            or last.low_latency_mode < low_latency_mode
        ):
            made.append(Buffer(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, explicitly_destroy=True))
        return made[-1]

    first = buffer_for(100, 0)
    assert buffer_for(100, 0) is buffer_for(40, 0) is first
    assert (first.num_nvl_bytes, first.num_rdma_bytes, first.low_latency_mode) == (100, 0, False)
    assert (first.group, first.explicitly_destroy, first.enable_shrink) == (group, True, False)
    hint = Buffer.get_low_latency_rdma_size_hint(4, 512, group.size(), group.size())
    second = buffer_for(0, hint, low_latency_mode=True)
    assert second is not first
    assert buffer_for(0, hint, low_latency_mode=True) is second
    assert (second.num_rdma_bytes, second.low_latency_mode) == (hint, True)
    for buffer in made:
        assert buffer.runtime is not None
        buffer.destroy()
        assert buffer.runtime is None

    elastic = ElasticBuffer(group, num_bytes=1 << 21, allow_hybrid_mode=False, prefer_overlap_with_compute=False)
    assert (elastic.group, elastic.num_bytes, elastic.deterministic) == (group, 1 << 21, False)
    assert (elastic.allow_hybrid_mode, elastic.prefer_overlap_with_compute) == (False, False)
    assert elastic.allow_multiple_reduction
    raises(AttributeError, "no attribute", getattr, elastic, "another")


def test_a_program_may_ask_its_buffer_what_it_was_made_with(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_keeps_its_buffer, 2))
