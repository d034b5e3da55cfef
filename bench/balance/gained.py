"""Measures what moving experts gains where gates pick unevenly: tokens per second of a server while its experts are where
they were first, and of the same server after it has moved them, in turns.

The real SGLang server with two ranks, one core each, and a random model whose gates like the experts better that the first
rank has alone at first. The same prompts are served again and again, and every token is checked. Answers have one token,
so that nearly all of a step is what experts do. Ranks tell how many tokens they computed, and when; a turn ends after so
many. Each turn with moved experts is compared with the two around it, so that what drifts hits both alike.

A rank that waits leaves its core to other programs, and a rank that works does not. So on a machine that has other things
to do, moved experts gain less. How much of it other programs took is told of each turn.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.balance.added_work import read_work
from bench.balance.placement_switch import AS_FIRST, EVEN, MODULE, PlacementState, read_state
from bench.balance.skewed_model import SIZE, held_by_first_alone, make_skewed_model
from bench.common.arguments import add_files, make_parser
from bench.common.drilled_server import describe_requests, describe_server, exit_code, origin_lines, say
from bench.common.other_programs import others_share, read_machine
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.common.server_switch import ServerSwitch
from eep.drill.devices import CPU
from eep.drill.load import Load
from eep.drill.sglang_server import Server
from eep.drill.token_certainty import clear_prompts

RANKS, SLOTS = 2, 9
ARGUMENTS = (
    *("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2", "--ep-backend", "eep"),
    # By default two ranks hold every expert each, and nothing needs to move.
    *("--eep-redundant-experts", "2", "--eep-timeout-ms", "20000"),
    # Short steps, so that looks and switches come soon; and room to move all that is to move at once.
    *("--chunked-prefill-size", "1024", "--enable-eplb", "--eplb-rebalance-num-iterations", "10"),
    *("--eep-staged-experts", "36"),
)
KINDS = {AS_FIRST: "as at first", EVEN: "moved"}
PROMPTS, TOKENS = 12, 1
QUIET_LOOKS, SETTLED_WITHIN_S = 3, 300.0
"""After how many looks without a move the moves count as over, and how long to wait for that."""
_STEPS_AFTER_SWITCH = 3
_TURN_WITHIN_S = 600.0
_QUIET = 0.05
"""If other programs take more of the machine in any turn, the page warns of it."""


@dataclass(frozen=True)
class PlacedTurn:
    """What ranks did in a turn."""

    moved: bool
    tokens_per_second: float
    busier_share: float
    """Of the picks, those that the busier rank computed."""
    experts_share: float
    """Of the time of the busier rank, by the clock: processor time of its experts."""
    waits_share: float
    """Of the time of the other rank: in exchanges, which is mostly waiting for the busier one."""
    experts_ms_per_token: float
    """Processor time of the experts of the busier rank. It holds also where other programs take a share of the cores."""
    others_share: float
    """Of the time of all cores: what went to programs that are not of this bench."""


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="eep-bench-") as place:
        return measure(options, Path(place))


def parse() -> argparse.Namespace:
    parser = make_parser(
        "bench.balance.gained",
        __doc__,
        "Files: balance-gained-cpu.json and balance-gained-cpu.md.\n\n"
        "examples:\n"
        "  python -m bench.balance.gained                                         about ten minutes\n"
        "  python -m bench.balance.gained --rounds 1 --tokens 5000 --no-files     does it work? three minutes",
    )
    parser.add_argument("--rounds", type=int, default=6, help="how often experts move and move back (default: 6)")
    parser.add_argument("--tokens", type=int, default=20000, help="how many tokens a turn lasts (default: 20000)")
    parser.add_argument("--clients", type=int, default=12, help="how many ask at once (default: 12)")
    parser.add_argument("--favour", type=float, default=10.0, help="how uneven the gates are; 1: even (default: 10)")
    add_files(parser)
    options = parser.parse_args()
    if min(options.rounds, options.clients, options.tokens) < 1 or not 1 <= options.favour <= 100:
        parser.error("--rounds, --clients and --tokens must be at least 1, and --favour 1 to 100")
    return options


def measure(options: argparse.Namespace, place: Path) -> int:
    head = provenance()
    model = make_skewed_model(place / "model", options.favour, held_by_first_alone(RANKS, SLOTS))
    switch = ServerSwitch(place / "switch", MODULE)
    server = Server(model, ARGUMENTS, place / "log", switch.environment(), directory=place / "d", device=CPU)
    with server:
        choose = random.Random(11)
        candidates = [[choose.randrange(3, 250) for _ in range(choose.randrange(128, 257))] for _ in range(4 * PROMPTS)]
        prompts = clear_prompts(server.url, candidates, PROMPTS, TOKENS)
        wanted = Load.with_reference(server.url, prompts, tokens=TOKENS).wanted
        load = Load(server.url, prompts, wanted, options.clients)
        with load:
            told, state = take_turns(server, switch, options.rounds, options.tokens)
    head["setting"] = {
        **{name: getattr(options, name) for name in ("rounds", "tokens", "clients", "favour")},
        **describe_server(CPU, ARGUMENTS),
    }
    head["requests"] = describe_requests(load)
    text = page(head, told)
    say(text)
    if not options.no_files:
        write_results(
            options.results / "balance-gained-cpu",
            {**head, "switches": state.doses, "turns": [asdict(each) for each in told]},
            text,
        )
    return exit_code(load, server.leftovers())


def take_turns(
    server: Server, switch: ServerSwitch, rounds: int, tokens: int
) -> tuple[list[PlacedTurn], PlacementState]:
    """One more turn with experts as at first than with moved ones."""
    told = []
    state = PlacementState(AS_FIRST, True, 0, 0)
    for number in range(2 * rounds + 1):
        position = EVEN if number % 2 else AS_FIRST
        switch.turn(position)
        state = wait_until_settled(switch.folder, position, SETTLED_WITHIN_S)
        before = wait_for_work(switch.folder, 0, _STEPS_AFTER_SWITCH)
        machine = read_machine([os.getpid(), *server.processes()])
        after = wait_for_work(switch.folder, tokens, 0, before)
        others = others_share(machine, read_machine([os.getpid(), *server.processes()]), os.cpu_count() or 1)
        told.append(compare(position == EVEN, before, after, others))
        say(f"{KINDS[position]}: {told[-1]}")
    return told, state


def wait_until_settled(folder: Path, position: int, within: float) -> PlacementState:
    """Until experts are where they are to be and have rested there. RuntimeError if that takes too long."""
    state: PlacementState | None = None

    def is_settled() -> bool:
        nonlocal state
        state = read_state(folder)
        return (
            state is not None
            and state.position == position
            and state.is_first == (position == AS_FIRST)
            and (position == AS_FIRST or state.looks >= QUIET_LOOKS)
        )

    _wait_until(is_settled, within, lambda: f"experts have not come to rest: {state}")
    assert state is not None
    return state


def wait_for_work(
    folder: Path, tokens: int, steps: int, since: Sequence[dict[str, float]] | None = None
) -> list[dict[str, float]]:
    """What each rank has done by now, once all have computed so many more tokens, and run so many more steps, than
    ``since``: than now, if that is None."""
    found: list[dict[str, float]] = []

    def is_done() -> bool:
        nonlocal found, since
        work = read_work(folder, RANKS)
        if work is None:
            return False
        found, since = work, since or work
        pairs = list(zip(since, found, strict=True))
        return _tokens(pairs) >= tokens and all(after["steps"] - before["steps"] >= steps for before, after in pairs)

    _wait_until(is_done, _TURN_WITHIN_S, lambda: f"ranks have not done their work; what they have done: {found}")
    return found


def _wait_until(holds: Callable[[], bool], within: float, problem: Callable[[], str]) -> None:
    end = time.monotonic() + within
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError(f"for {within:.0f} s {problem()}")
        time.sleep(0.02)


def _tokens(pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> float:
    return sum(after["rows"] - before["rows"] for before, after in pairs) / SIZE.layers


def compare(
    moved: bool, before: list[dict[str, float]], after: list[dict[str, float]], others: float = 0.0
) -> PlacedTurn:
    """What ranks did between two readings. Both ranks run the same steps."""
    pairs = list(zip(before, after, strict=True))
    more = [{name: late[name] - early[name] for name in late} for early, late in pairs]
    tokens = _tokens(pairs)
    busier, other = sorted(more, key=lambda each: -each["picks"])
    return PlacedTurn(
        moved,
        tokens_per_second=round(tokens / statistics.fmean(each["at"] for each in more), 1),
        busier_share=round(busier["picks"] / sum(each["picks"] for each in more), 4),
        experts_share=round(busier["experts"] / busier["at"], 4),
        waits_share=round(other["waits"] / other["at"], 4),
        experts_ms_per_token=round(1e3 * max(each["experts"] for each in more) / tokens, 4),
        others_share=round(others, 4),
    )


def gains(told: Sequence[PlacedTurn], figure: Callable[[PlacedTurn], float]) -> list[float]:
    """Each turn with moved experts over the mean of the two around it."""
    found = [figure(each) for each in told]
    return [2 * found[place] / (found[place - 1] + found[place + 1]) for place in range(1, len(found), 2)]


def page(head: dict[str, Any], told: Sequence[PlacedTurn]) -> str:
    setting, requests = head["setting"], head["requests"]
    rates = gains(told, lambda each: each.tokens_per_second)
    work = gains(told, lambda each: each.experts_ms_per_token)
    others = max(each.others_share for each in told)
    warning = f" Other programs took up to {others:.0%} of the machine, so tokens per second say little."
    return "\n".join(
        [
            "# What moving experts gains, cpu",
            "",
            *origin_lines(head),
            f"Two ranks, one core each; gates whose scores spread {setting['favour']:g} times as wide for the experts of one "
            f"rank; {setting['clients']} clients, prompts of 128 to 256 tokens, answers of {TOKENS}. "
            f"{requests['answered']} answers, {requests['failed']} failed, {requests['wrong']} wrong.",
            "",
            "| experts | tokens per second | picks of the busier rank | time of its experts | time of the other rank in "
            "exchanges, mostly waiting | processor ms of the busier experts per token | other programs |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *(
                f"| {KINDS[int(each.moved)]} | {each.tokens_per_second:.0f} | {each.busier_share:.0%} | "
                f"{each.experts_share:.0%} | {each.waits_share:.0%} | {each.experts_ms_per_token:.3f} | "
                f"{each.others_share:.0%} |"
                for each in told
            ),
            "",
            "Each turn with moved experts over the mean of the two around it, median and range of "
            f"{len(rates)}: {_told(rates)} times as many tokens per second. The experts of the busier rank take "
            f"{_told(work)} times as much processor time for each token.{warning if others > _QUIET else ''}",
            "",
        ]
    )


def _told(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


if __name__ == "__main__":
    sys.exit(main())
