"""Bad input: a clear exception, nothing changed, and the group keeps working."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import eep
from tests import moe

CONFIG = moe.Config(ranks=1, max_ranks=2, max_tokens=4, hidden=128, topk=2, local_experts=2)
X = torch.ones(3, 128, dtype=torch.bfloat16)
IDX = torch.zeros(3, 2, dtype=torch.int64)


@pytest.fixture
def buffer(rendezvous: eep.Rendezvous) -> Iterator[eep.Buffer]:
    with CONFIG.buffer(0, rendezvous) as buffer:
        buffer.connect_ranks([0])
        yield buffer


CALLS: list[tuple[Callable[[eep.Buffer], Any], type[Exception], str]] = [
    (lambda b: b.dispatch(X[:, :64], IDX), ValueError, r"x must be of shape \[any, 128\], got \[3, 64\]"),
    (lambda b: b.dispatch(X[0], IDX), ValueError, "x must be of shape"),
    (lambda b: b.dispatch(X.half(), IDX), TypeError, "x must be torch.float32 or torch.bfloat16"),
    (lambda b: b.dispatch(X.float(), IDX), TypeError, "this dispatch sends bf16"),
    (lambda b: b.dispatch(X.t().contiguous().t(), IDX), ValueError, "contiguous"),
    (lambda b: b.dispatch(X, IDX[:2]), ValueError, r"topk_idx must be of shape \[3, any\]"),
    (lambda b: b.dispatch(X, IDX.int()), TypeError, "topk_idx must be torch.int64"),
    (lambda b: b.dispatch(X, IDX[:, :0]), ValueError, "top-k must be between 1 and 2"),
    (lambda b: b.dispatch(X, IDX.repeat(1, 2)), ValueError, "top-k must be between 1 and 2"),
    (lambda b: b.dispatch(X, IDX + 4), ValueError, r"topk_idx\[0, 0\] is 4, expert slots go from 0 to 3"),
    (lambda b: b.dispatch(X, IDX - 2), ValueError, r"topk_idx\[0, 0\] is -2"),
    (lambda b: b.dispatch(X, IDX, torch.ones(3, 1)), ValueError, r"topk_weights must be of shape \[3, 2\]"),
    (
        lambda b: b.dispatch(X, IDX, torch.ones(3, 2).double()),
        TypeError,
        "topk_weights must be torch.float32",
    ),
    (
        lambda b: b.dispatch(X.repeat(2, 1), IDX.repeat(2, 1)),
        ValueError,
        "6 tokens are more than the maximum of 4",
    ),
    (lambda b: b.dispatch(X, IDX, channel=1), ValueError, "channel 1 does not exist"),
    (lambda b: b.dispatch(X, IDX, wire="fp8"), ValueError, "sends the type it was made for"),
    (lambda b: b.dispatch(X, IDX, wire="int3"), ValueError, "wire must be one of f32, bf16"),
    (lambda b: b.dispatch(X.to("meta"), IDX), ValueError, "x is on meta"),
    (lambda b: b.connect_ranks([2]), ValueError, "rank 2 is outside the capacity of 2 ranks"),
    (lambda b: b.connect_ranks([-1]), ValueError, "rank -1 is outside"),
    (lambda b: b.disconnect_ranks([5]), ValueError, "rank 5 is outside"),
    (lambda b: b.disconnect_ranks([0]), ValueError, "cannot disconnect itself"),
    (lambda b: b.connect_ranks([], epoch=1), eep.EepError, "epochs only grow"),
    (lambda b: b.connect_ranks([], epoch=2**24), eep.EepError, "epochs only grow"),
    (lambda b: b.apply_view(eep.View(5, (0,), (0,))), ValueError, "does not fit a capacity of 2"),
    (lambda b: setattr(b, "timeout_ms", 0), ValueError, "timeout_ms must be positive"),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS, ids=[message for *_, message in CALLS])
def test_bad_calls(buffer: eep.Buffer, call: Callable[[eep.Buffer], Any], error: type, message: str) -> None:
    before = (buffer.view, buffer.timeout_ms)
    with pytest.raises(error, match=message):
        call(buffer)
    assert (buffer.view, buffer.timeout_ms) == before
    output = moe.step(buffer, CONFIG, 1, (0,))
    assert torch.equal(output, moe.reference(CONFIG, moe.make_batch(CONFIG, 0, 1, (0,))))
    assert buffer.status().ok


def test_a_call_out_of_turn_is_refused_and_the_right_one_goes_on(buffer: eep.Buffer) -> None:
    sent = buffer.dispatch_send(X, IDX)
    with pytest.raises(eep.EepError, match="expects the receive phase of the dispatch next"):
        buffer.dispatch_send(X, IDX)
    tokens = buffer.dispatch_recv(sent)
    with pytest.raises(eep.EepError, match="expects a combine next"):
        buffer.dispatch(X, IDX)
    with pytest.raises(eep.EepError, match="expects a combine next"):
        buffer.combine_recv(sent)
    buffer.combine(buffer.combine_input(), tokens)
    with pytest.raises(eep.EepError, match="expects a dispatch next"):
        buffer.combine(buffer.combine_input(), tokens)


def test_bad_arguments_of_a_combine_are_refused_and_good_ones_go_on(buffer: eep.Buffer) -> None:
    sent = buffer.dispatch_send(X, IDX)
    tokens = buffer.dispatch_recv(sent)
    with pytest.raises(ValueError, match="x must be of shape"):
        buffer.combine(X, tokens)
    with pytest.raises(TypeError, match=r"x must be torch\.bfloat16"):
        buffer.combine(buffer.combine_input().float(), tokens)
    buffer.combine_send(buffer.combine_input(), tokens)
    with pytest.raises(ValueError, match=r"out must be of shape \[3, 128\]"):
        buffer.combine_recv(sent, out=torch.empty(2, 128, dtype=torch.bfloat16))
    buffer.combine_recv(sent)


def test_a_view_between_dispatch_and_combine_ends_the_step(buffer: eep.Buffer) -> None:
    tokens = buffer.dispatch(X, IDX)
    buffer.connect_ranks([])
    with pytest.raises(eep.EpochRevoked, match="from epoch 1 to 2 since the dispatch; start the step again"):
        buffer.combine(buffer.combine_input(), tokens)
    moe.step(buffer, CONFIG, 1, (0,))
    assert buffer.status().ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_ranks": 513}, r"between 1 and 512, got 513 \(a CPU serves up to 512, a GPU up to 64\)"),
        ({"max_ranks": 0}, "max_ranks must be positive"),
        ({"max_tokens": 70000}, "max_tokens must be between 1 and 65535"),
        ({"hidden": 0}, "hidden must be positive"),
        ({"topk": 17}, "max_topk must be between 1 and 16"),
        ({"local_experts": -1}, "local_experts must be positive"),
        ({"layout": "diagonal"}, "layout must be one of rank, expert"),
        ({"wire": "fp4"}, "wire must be one of"),
        ({"combine": "bf16"}, "combine must be one of fp8"),
        ({"combine": "fp8", "hidden": 100}, "multiple of 128, got 100"),
        ({"combine": "fp8", "wire": "f32"}, "those of a buffer with wire='f32' are f32"),
        ({"wire": "fp8", "hidden": 100}, "multiple of 128, got 100"),
        ({"channels": 3}, "channels must be between 1 and 2"),
        ({"sms": 0}, "sms must be positive"),
        ({"timeout_ms": -1}, "timeout_ms must be positive"),
        ({"rank": 2}, "rank 2 is outside the capacity of 2 ranks"),
        ({"device": "meta"}, "no data plane for device 'meta'"),
    ],
)
def test_bad_buffers(rendezvous: eep.Rendezvous, change: dict[str, Any], message: str) -> None:
    good = {"rank": 0, "max_ranks": 2, "max_tokens": 4, "hidden": 128, "topk": 2, "local_experts": 2}
    with pytest.raises(ValueError, match=message):
        eep.Buffer(rendezvous=rendezvous, **{**good, **change})
    assert rendezvous.claimed_ranks() == {}


def test_a_closed_buffer_says_so(rendezvous: eep.Rendezvous) -> None:
    buffer = CONFIG.buffer(0, rendezvous)
    buffer.close()
    buffer.close()
    for call in (buffer.status, buffer.revoke, buffer.barrier, lambda: buffer.dispatch(X, IDX)):
        with pytest.raises(eep.EepError, match="closed"):
            call()


def test_status_reads_like_a_sentence() -> None:
    assert str(eep.Status(3)) == "epoch 3: all well"
    bad = eep.Status(3, suspects=(1, 2))
    assert str(bad) == "epoch 3: no answer from ranks 1, 2"
    with pytest.raises(eep.StepFailed, match="must be run again"):
        bad.raise_if_bad()
    with pytest.raises(eep.EpochRevoked):
        eep.Status(3, revoked=True).raise_if_bad()
