"""One request and what came back for it, whatever its kind. Uses nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from eep.drill.request_mix import Query

LOGPROB_TOLERANCE = 1e-3
"""By how many nats the log-probability of a token may differ: float32 adds up in another order in another batch."""


@dataclass(slots=True)
class Answer:
    """What came back for one request."""

    prompt: int
    """The number of the prompt, or of the query."""
    started: float
    tokens: list[int] = field(default_factory=list)
    """Those of a batch one after the other, each part ended by -1."""
    times: list[float] = field(default_factory=list)
    """When each token came (``time.monotonic``); of text, when each part came."""
    problem: str = ""
    usage: tuple[int, int] = (0, 0)
    """Prompt and completion tokens, as the server counts them."""
    rank: int | None = None
    """Which rank was to serve it, if one was named."""
    text: str = ""
    finish: str = ""
    """Why it ended, as the server says."""
    logprobs: list[tuple[float, int]] = field(default_factory=list)
    """Log-probability and token, where they were asked for."""
    is_cut: bool = False
    """The client went away before the end, on purpose."""
    name: str = ""
    """What the client called the request; the ranks write it down."""

    def gaps(self) -> list[float]:
        """The waits between its tokens, the one for the first among them."""
        moments = [self.started, *self.times]
        return [later - earlier for earlier, later in pairwise(moments)]


def put(
    url: str,
    query: Query,
    *,
    timeout: float = 240.0,
    cut_after: int | None = None,
    rank: int | None = None,
    name: str = "",
) -> Answer:
    """Asks a server. ``cut_after``: the client goes away after so many tokens. ``rank`` is to serve it, if it is in. ``name``
    is for a single request of tokens. Never raises: see ``problem``."""
    native = query.path == "/generate"
    answer = Answer(query.number, time.monotonic(), rank=rank, name=name if native and query.prompt else "")
    body = {**query.body, **({} if rank is None else {"routed_dp_rank": rank})}
    if answer.name:
        body["rid"] = answer.name
    try:
        if query.is_streamed:
            for chunk in stream(url, query.path, body, timeout):
                if "error" in chunk:
                    answer.problem = str(chunk["error"])[:500]
                    break
                (_add_native if native else _add_openai)(answer, chunk)
                if cut_after is not None and len(answer.tokens) >= cut_after:
                    answer.is_cut = True
                    return answer
        else:
            _add_whole(answer, _post(url, query.path, body, timeout))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        answer.problem = answer.problem or f"{type(error).__name__}: {error}"
    if not answer.problem and '"abort"' in answer.finish:
        answer.problem = f"the server gave the request up: {answer.finish}"
    return answer


def difference(wanted: Answer, got: Answer) -> str:
    """What is wrong with an answer that should be like ``wanted``; nothing if that is so. Of an answer that was cut only the
    beginning can be."""
    if got.is_cut:
        return _unlike("tokens", wanted.tokens[: len(got.tokens)], got.tokens)
    for what in ("tokens", "text", "usage", "finish"):
        if wrong := _unlike(what, getattr(wanted, what), getattr(got, what)):
            return wrong
    if [token for _, token in wanted.logprobs] != [token for _, token in got.logprobs]:
        return f"log-probabilities of other tokens: {len(got.logprobs)} of {len(wanted.logprobs)}"
    worst = max((abs(a - b) for (a, _), (b, _) in zip(wanted.logprobs, got.logprobs, strict=True)), default=0.0)
    return f"log-probabilities differ by {worst:.4f}" if worst > LOGPROB_TOLERANCE else ""


def first_difference(wanted: Answer, got: Answer) -> int | None:
    """The place of the first token that is not as it should be."""
    pairs = enumerate(zip(wanted.tokens, got.tokens, strict=False))
    return next((place for place, (one, other) in pairs if one != other), None)


def _unlike(what: str, wanted: Any, got: Any) -> str:
    if wanted == got:
        return ""
    if not isinstance(wanted, (list, str)):
        return f"{what}: {got}, should be {wanted}"
    shorter = min(len(wanted), len(got))
    at = next((place for place in range(shorter) if wanted[place] != got[place]), shorter)
    return f"{what}: {len(got)} of {len(wanted)}, from {at} on {got[at : at + 6]!r}, should be {wanted[at : at + 6]!r}"


def new_tokens(chunk: Mapping[str, Any], seen: int) -> list[int]:
    """What a part of a streamed answer adds to the ``seen`` tokens before it. A server sends all of them with every part, or,
    with ``--incremental-streaming-output``, only those that are new."""
    ids: list[int] = chunk.get("output_ids") or []
    total = (chunk.get("meta_info") or {}).get("completion_tokens", seen + len(ids))
    return ids[seen:] if len(ids) == total else ids


def _add_native(answer: Answer, chunk: Mapping[str, Any]) -> None:
    meta, text, seen = chunk["meta_info"], chunk.get("text") or "", len(answer.tokens)
    ids = chunk.get("output_ids") or []
    fresh = new_tokens(chunk, seen)
    is_whole = len(ids) == meta.get("completion_tokens") and seen > 0
    if is_whole and ids[:seen] != answer.tokens:
        raise ValueError(f"the stream took back tokens that it had sent, at {seen}")
    answer.text = text if is_whole or not seen else answer.text + text
    answer.tokens += fresh
    answer.times += [time.monotonic()] * len(fresh)
    if meta["completion_tokens"] != len(answer.tokens):
        raise ValueError(f"the server counts {meta['completion_tokens']} tokens and has sent {len(answer.tokens)}")
    _note_end(answer, meta)


def _add_openai(answer: Answer, chunk: Mapping[str, Any]) -> None:
    for choice in chunk.get("choices") or []:
        part = choice.get("text") if "text" in choice else (choice.get("delta") or {}).get("content")
        if part:
            answer.text += part
            answer.times.append(time.monotonic())
        if choice.get("finish_reason"):
            answer.finish = json.dumps(choice["finish_reason"])
    if usage := chunk.get("usage"):
        answer.usage = (usage["prompt_tokens"], usage["completion_tokens"])


def _add_whole(answer: Answer, body: Any) -> None:
    for part in body if isinstance(body, list) else [body]:
        if "error" in part:
            raise ValueError(str(part["error"])[:500])
        answer.tokens += [*part["output_ids"], -1]
        answer.text += part["text"] + "\n"
        prompt, completion = answer.usage
        _note_end(answer, part["meta_info"])
        answer.usage = (prompt + answer.usage[0], completion + answer.usage[1])
    answer.times = [time.monotonic()]


def _note_end(answer: Answer, meta: Mapping[str, Any]) -> None:
    answer.usage = (int(meta["prompt_tokens"]), int(meta["completion_tokens"]))
    answer.finish = json.dumps(meta.get("finish_reason"), sort_keys=True)
    if told := meta.get("output_token_logprobs"):
        fresh = [(float(value), int(token)) for value, token, *_ in told]
        answer.logprobs = fresh if len(fresh) == len(answer.tokens) else answer.logprobs + fresh


def stream(url: str, path: str, body: Mapping[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer; one with "error" ends it."""
    connection = _connect(url, timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            yield {"error": f"HTTP {response.status}: {response.read(500).decode(errors='replace')}"}
            return
        for line in response:
            if line.startswith(b"data:"):
                if (text := line[5:].strip()) == b"[DONE]":
                    return
                yield json.loads(text)
        yield {"error": "the stream ended early"}
    finally:
        connection.close()


def _post(url: str, path: str, body: Mapping[str, Any], timeout: float) -> Any:
    connection = _connect(url, timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        told = response.read()
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {told[:500].decode(errors='replace')}")
        return json.loads(told)
    finally:
        connection.close()


def _connect(url: str, timeout: float) -> http.client.HTTPConnection:
    place = urlsplit(url)
    return http.client.HTTPConnection(place.hostname or "127.0.0.1", place.port, timeout=timeout)
