"""The text of a request that has moved goes on where its client has it, in SGLang's own detokenizer."""

from __future__ import annotations

import json

from tests.sglang_patches.server.test_command_line import run_python

PROGRAM = """
import json, random
from types import SimpleNamespace
from sglang_patches import cpu
cpu.fill_gaps()
from sglang.srt.managers.detokenizer_manager import DetokenizerManager, LimitedCapacityDict
from eep.drill.models.byte_tokenizer import make_tokenizer
from sglang_patches.server import sent_text

decode = DetokenizerManager._decode_batch_token_id_output
manager = DetokenizerManager.__new__(DetokenizerManager)
manager.tokenizer, manager.vocab_size = make_tokenizer(), 512
manager.disable_tokenizer_batch_decode = manager.is_tool_call_parser_gpt_oss = False
manager.decode_status = LimitedCapacityDict(capacity=1024)

def texts(way, tokens, first):
    '''What is sent if the first part has so many tokens, and each other part has one.'''
    parts = [tokens[:first], *([each] for each in tokens[first:])]
    return [way(manager, SimpleNamespace(
        rids=["one"], decoded_texts=[""], decode_ids=[part], read_offsets=[0], no_stop_trim=[False],
        finished_reasons=[{"type": "length"} if number == len(parts) else None],
        skip_special_tokens=[True], spaces_between_special_tokens=[True]))[0]
        for number, part in enumerate(parts, 1)]

choose = random.Random(3)
pieces = [manager.tokenizer.encode(each) for each in ("好", "的", "😀", "é", "a", " ", "\\n", "<")]
pieces += [pieces[2][:1], pieces[0][1:2]]  # the beginning of a character, and the middle of one
answers = [sum(choose.choices(pieces, k=8), []) for _ in range(100)]
counts = {}
for name, way in (("sglang", decode), ("hooked", lambda *given: sent_text._decode(decode, *given))):
    counts[name] = 0
    for tokens in answers:
        whole = texts(way, tokens, 1)
        for moved in range(1, len(tokens)):
            has = "".join(whole[:moved])
            goes_on = "".join(texts(way, tokens, moved + 1))
            counts[name] += has + goes_on[len(has):] != "".join(whole)
    assert not manager.decode_status
print(json.dumps(counts))
"""


def test_a_client_gets_no_text_twice_wherever_its_request_moves(sglang: None) -> None:
    """Answers with Chinese characters and parts of characters. SGLang alone sends some of that twice."""
    done = run_python(PROGRAM, EEP_CPU_GAPS="1", SGLANG_USE_CPU_ENGINE="1")
    assert done.returncode == 0, done.stderr[-3000:]
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert wrong["sglang"] > 0, "SGLang is mended: the hook can go"
    assert wrong["hooked"] == 0
