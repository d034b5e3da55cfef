"""In a scheduler: a request that another rank has served goes on where it was.

SGLang can take a request out of its batch and prefill it again with the tokens that it had produced (retraction). A replayed
request is brought into the same state: its delivered tokens are its *output* so far, not prompt. So every rule about output
holds as if nothing had happened: length limits, stop strings that span the move, sampling seeds (which go by position), token
counts, reasoning tokens. What retraction keeps in memory is made again here: the state of the grammar, and the penalties on
tokens that were used (which SGLang itself forgets when it retracts).
"""

from __future__ import annotations

from array import array
from typing import Any

from sglang_patches import hooks
from sglang_patches.rank.kv.restore import restore, take_lost_life
from sglang_patches.replayed_fields import DELIVERED

_MARK = "_eep_delivered"


def register() -> None:
    hooks.hook("managers.scheduler.Scheduler._add_request_to_queue", _before_queue, "before")
    hooks.hook("sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", _after_sampling_info, "after")


def _before_queue(scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
    lost, delivered = take_lost_life(request), take_delivered(request)
    if request.finished_reason is not None or request.to_finish is not None:
        return
    if delivered:
        resume(scheduler, request, delivered)
    if lost is not None:
        restore(scheduler, request, lost)


def take_delivered(request: Any) -> list[int]:
    """The delivered tokens that a request brought along. A second call returns none."""
    parameters = request.sampling_params.custom_params
    if not isinstance(parameters, dict) or DELIVERED not in parameters:
        return []
    # SGLang has copied the parameters for this request; the client's own stay as they are.
    delivered = list(parameters.pop(DELIVERED))
    if set(parameters) <= {"__req__"}:
        request.sampling_params.custom_params = None
    return delivered


def resume(scheduler: Any, request: Any, delivered: list[int]) -> None:
    """Bring a request that has not run here into the state of one that was retracted after ``delivered``."""
    count = len(delivered)
    request.output_ids = array("q", delivered)
    request.is_retracted = True
    request.retracted_stain = True
    request.send_token_offset = count  # the client has these; send_decode_id_offset stays, since the text is made again
    setattr(request, _MARK, True)
    if request.return_logprob:
        _resume_logprobs(request, count)
    scheduler.batch_result_processor._maybe_update_reasoning_tokens(request, delivered)
    if request.grammar is not None:
        for token in delivered:
            request.grammar.accept_token(token)


def _resume_logprobs(request: Any, count: int) -> None:
    held = request.logprob
    for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
        for part in ("val", "idx"):
            if getattr(held, f"{name}_{part}") is not None:
                setattr(held, f"{name}_{part}", [None] * count)
    request.send_output_token_logprobs_offset = count
    # Those of the prompt went out with the first output; computing them again would send them twice.
    request.input_logprob_sent = True
    request.logprob_start_len = -1


def _after_sampling_info(info: Any, _cls: type, batch: Any, *__: Any, **___: Any) -> Any:
    orchestrator = info.penalizer_orchestrator
    rows = [row for row, request in enumerate(batch.reqs) if getattr(request, _MARK, False) and len(request.output_ids)]
    if orchestrator.is_required and rows:
        for penalizer in orchestrator.penalizers.values():
            if penalizer._is_prepared:
                _recall(penalizer, batch.reqs, rows)
    return info


def _recall(penalizer: Any, requests: list[Any], rows: list[int]) -> None:
    """Tell a penalizer what the requests in ``rows`` have produced."""
    import torch

    for row in rows:
        produced = torch.tensor(list(requests[row].output_ids), dtype=torch.int64, device=penalizer.orchestrator.device)
        if hasattr(penalizer, "len_output_tokens"):
            penalizer.len_output_tokens[row] = len(produced)
        elif hasattr(penalizer, "cumulated_frequency_penalties"):
            held = penalizer.cumulated_frequency_penalties[row]
            held.index_add_(0, produced, penalizer.frequency_penalties[row].expand(len(produced)))
        elif hasattr(penalizer, "cumulated_presence_penalties"):
            penalizer.cumulated_presence_penalties[row, produced] = penalizer.presence_penalties[row]
        elif hasattr(penalizer, "cumulated_repetition_penalties"):
            penalizer.cumulated_repetition_penalties[row, produced] = penalizer.repetition_penalties[row]
