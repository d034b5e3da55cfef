"""Every kind of request that a client can send, and a client that sends one and keeps the reply."""

from __future__ import annotations

import http.client
import json
import threading
from dataclasses import dataclass, field
from typing import Any

from eep.drill.sglang_server import Server

TOKENS = 120
TEXT = "It was a bright cold day in April, and "


@dataclass(frozen=True)
class Kind:
    """A way to ask. ``samples``: how many answers come back, each of them a request to the ranks."""

    path: str
    body: dict[str, Any]
    samples: int = 1


def native(stream: bool = False, **parameters: Any) -> Kind:
    """SGLang's own endpoint. Parameters of the request itself begin with an underscore, the others are of the sampling."""
    outer = {name[1:]: value for name, value in parameters.items() if name.startswith("_")}
    inner = {name: value for name, value in parameters.items() if not name.startswith("_")}
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, **inner}
    return Kind("/generate", {"text": TEXT, "stream": stream, "sampling_params": sampling, **outer})


def openai(path: str, stream: bool = False, n: int = 1, **parameters: Any) -> Kind:
    asked = {"messages": [{"role": "user", "content": TEXT}]} if "chat" in path else {"prompt": TEXT}
    body = {"model": "default", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": stream, "n": n}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    return Kind(path, {**body, **asked, **usage, **parameters}, n)


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


SCHEMA = {"type": "object", "properties": {"items": {"type": "array", "items": {"type": "integer"}, "minItems": 60}}}


GREEDY = {
    "generate": native(),
    "generate streamed": native(True),
    "completions": openai(COMPLETIONS),
    "completions streamed": openai(COMPLETIONS, True),
    "chat": openai(CHAT),
    "chat streamed": openai(CHAT, True),
    "two samples": openai(COMPLETIONS, True, n=2),
    "log-probabilities": native(True, _return_logprob=True, _logprob_start_len=0, _top_logprobs_num=2),
    "log-probabilities at once": native(_return_logprob=True, _logprob_start_len=0, _top_logprobs_num=2),
    "completions with log-probabilities": openai(COMPLETIONS, logprobs=2),
    "frequency penalty": native(True, frequency_penalty=0.7),
    "presence penalty": native(presence_penalty=0.9),
    "repetition penalty": native(True, repetition_penalty=1.3),
    "regex": native(True, regex="(([a-f]{3}-){2}[0-9]{2};){20}"),
    "json schema": native(json_schema=json.dumps(SCHEMA)),
}


SAMPLED = {
    "sampled": native(True, temperature=0.8, sampling_seed=7),
    "sampled at once": native(temperature=0.8, sampling_seed=7),
    "sampled by another seed": native(True, temperature=0.8, sampling_seed=8),
    "sampled of the likely": native(True, temperature=0.8, sampling_seed=7, top_p=0.9, top_k=40, min_p=0.1),
    "sampled with a penalty": native(temperature=0.8, sampling_seed=7, frequency_penalty=0.7),
    "sampled by a regex": native(True, temperature=0.8, sampling_seed=7, regex="(([a-f]{3}-){2}[0-9]{2};){20}"),
    "sampled completions": openai(COMPLETIONS, True, temperature=0.8, seed=7),
    "two sampled": openai(COMPLETIONS, True, n=2, temperature=0.8, seed=7),
}


UNSEEDED = native(True, temperature=0.8)


@dataclass
class Reply:
    """What a client has at the end, whichever way it came."""

    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    counts: tuple[int, int] = (0, 0)
    finished: dict[int, Any] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    other_logprobs: list[Any] = field(default_factory=list)
    events: int = 0
    problem: str = ""

    def take(self, said: dict[str, Any]) -> None:
        self.events += 1
        if "error" in said or said.get("object") == "error":
            self.problem = str(said)
        elif "meta_info" in said:
            self._take_native(said)
        else:
            self._take_openai(said)

    def _take_native(self, said: dict[str, Any]) -> None:
        meta = said["meta_info"]
        self.texts[0] = said["text"]
        self.tokens = said["output_ids"]
        self.counts = meta["prompt_tokens"], meta["completion_tokens"]
        self.finished[0] = meta["finish_reason"]
        if "output_token_logprobs" in meta:
            self.logprobs = [each[0] for each in meta["output_token_logprobs"]]
            self.logprobs += [each[0] for each in meta["input_token_logprobs"][1:]]
            top = meta["output_top_logprobs"]
            self.other_logprobs = [len(top), [[token for _, token, *_ in each] for each in top]]

    def _take_openai(self, said: dict[str, Any]) -> None:
        for choice in said["choices"]:
            index = choice["index"]
            part = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            self.texts[index] = self.texts.get(index, "") + part
            self.finished[index] = choice["finish_reason"] or self.finished.get(index)
            if choice.get("logprobs"):
                self.logprobs += choice["logprobs"]["token_logprobs"]
        if said.get("usage"):
            self.counts = said["usage"]["prompt_tokens"], said["usage"]["completion_tokens"]


class Asking(threading.Thread):
    """One client, waiting for its answer."""

    def __init__(self, server: Server, kind: Kind, rank: int | None, **more: Any) -> None:
        super().__init__(daemon=True)
        self.reply = Reply()
        self._port, self._path = server.port, kind.path
        self._body = {**kind.body, **({} if rank is None else {"routed_dp_rank": rank}), **more}
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=200)
        try:
            connection.request("POST", self._path, json.dumps(self._body), {"content-type": "application/json"})
            response = connection.getresponse()
            self.reply.status = response.status
            if not self._body["stream"]:
                self.reply.take(json.loads(response.read()))
                return
            for line in response:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    self.reply.take(json.loads(line[5:]))
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self.reply.problem = f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def result(self, within: float = 200.0) -> Reply:
        self.join(within)
        assert not self.is_alive(), f"{self._path} did not end within {within} s"
        return self.reply
