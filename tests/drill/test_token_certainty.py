"""Which prompts are clear enough to compare answers by, asked of a server that is made up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eep.drill.token_certainty import clear_prompts, goes_on_alike, margin, weigh_answer


class Server(BaseHTTPRequestHandler):
    """At each place of the answer to ``[n]`` the likeliest token is 1 ahead, but for the last: there it is 1/n. Its tokens
    are n, n+1 and so on; if n is odd, they are others where an answer is continued after its third. A rank r that is named
    says n+r."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.get("stream"):
            self.stream(asked["input_ids"], asked["sampling_params"]["max_new_tokens"])
            return
        assert (asked["return_logprob"], asked["top_logprobs_num"]) == (True, 2)
        ahead = [1.0] * (asked["sampling_params"]["max_new_tokens"] - 1) + [1 / asked["input_ids"][0]]
        places = [[[-0.5, 7, None], [-0.5 - each, 9, None]] for each in ahead]
        said = [asked["input_ids"][0] + number + asked.get("routed_dp_rank", 0) for number in range(len(ahead))]
        body = json.dumps({"output_ids": said, "meta_info": {"output_top_logprobs": places}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, prompt: list[int], count: int) -> None:
        first, place = prompt[0], len(prompt) - 1
        differs = first % 2 == 1 and place == 3
        ids = [first + place + number + differs for number in range(count)]
        chunk = {"output_ids": ids, "meta_info": {"completion_tokens": count}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_closest_place_counts(url: str) -> None:
    assert margin(url, [4], 5) == pytest.approx(0.25)


def test_an_answer_comes_with_how_sure_it_is_and_from_the_rank_that_is_named(url: str) -> None:
    assert weigh_answer(url, [4], 3) == ([4, 5, 6], pytest.approx(0.25))
    assert weigh_answer(url, [4], 3, rank=2)[0] == [6, 7, 8]


def test_prompts_with_a_near_tie_are_left_out(url: str) -> None:
    candidates = [[2], [1000], [3], [2000], [4], [5]]
    assert clear_prompts(url, candidates, 3, 5, least=0.1) == [[2], [3], [4]]
    with pytest.raises(ValueError, match="of 6 prompts only 4 have answers"):
        clear_prompts(url, candidates, 5, 5, least=0.1)


def test_prompts_whose_answers_depend_on_where_they_are_continued_are_left_out(url: str) -> None:
    assert goes_on_alike(url, [4], 6)
    assert not goes_on_alike(url, [5], 6)
    assert goes_on_alike(url, [5], 3), "it has no place after its third token"
    candidates = [[2], [1000], [3], [4], [5], [6]]
    assert clear_prompts(url, candidates, 3, 6, least=0.1, continued=True) == [[2], [4], [6]]
    with pytest.raises(ValueError, match="go on alike"):
        clear_prompts(url, candidates, 4, 6, least=0.1, continued=True)
