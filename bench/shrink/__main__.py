"""How a server of many ranks gets over the loss of several at once: 1, 2, 4 or 8 of 8 or 16.

Starts the server, drives a load whose every token is checked, and kills so many ranks at once, the larger numbers later, each
time when all are back. What it waits for is said while it runs, and has a limit. Told are of each loss: the time until the
survivors run again, where the experts come from that they bring in, how many tokens per second they make until the ranks are
back, when these are, and when the server makes 95 % of the tokens per second that it made before.

On one GPU, where ranks share it, a spare is prepared for each rank, 16 processes for eight ranks: leave --spares at 0 where
minutes count.

Writes shrink-DEVICE-RANKS.json and .md into --out, also when --within ends it before the last loss. The exit code is 0 only
if no request failed, no token was wrong and nothing was left over.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from bench.common.drilled_server import (
    RESULTS,
    choose_prompts,
    describe_requests,
    describe_server,
    exit_code,
    say,
)
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.failover.kills import brought_in, kill_now
from bench.shrink.loss import WINDOW, Loss, lines_until, loss_of
from bench.shrink.report import page
from eep.drill.devices import DEVICES, Device
from eep.drill.load import Load
from eep.drill.models.checkpoint import make_model
from eep.drill.models.model_sizes import SIZES
from eep.drill.sglang_server import Server
from eep.drill.story import Story

BACK_WITHIN = 120.0
"""Seconds for lost ranks to be back."""
SPARES_WITHIN = 120.0
"""Seconds for all spares to be ready."""
FEW_GRAPHS = ("--cuda-graph-max-bs-decode", "8")
"""A rank captures a graph for each batch size before it serves, and serves few requests here."""


def main() -> int:
    options = parse()
    device = DEVICES[options.device]
    with tempfile.TemporaryDirectory(prefix="eep-bench-") as place, device.prepared() as needed:
        return measure(options, Path(place), device, needed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=sorted(DEVICES), default="cpu", help="where the ranks run (default: cpu)")
    add("--ranks", type=int, default=8, help="how many ranks the server has (default: 8)")
    add(
        "--lose",
        type=_numbers,
        default=[1, 2, 4],
        help="how many to lose at once, one after the other (default: 1,2,4)",
    )
    add("--slots", type=int, default=4, help="expert slots of each rank; the model has 16 experts (default: 4)")
    add(
        "--backup", choices=("off", "live", "checkpoint"), default="live", help="experts in host memory (default: live)"
    )
    add("--spares", type=int, default=0, help="how many to keep (default: 0)")
    add("--clients", type=int, help="how many stream at once (default: two for each rank)")
    add("--tokens", type=int, default=48, help="the length of an answer (default: 48)")
    add("--within", type=float, default=900.0, help="seconds after which no further loss is begun (default: 900)")
    add("--seed", type=int, default=1, help="decides which ranks are lost (default: 1)")
    add("--out", type=Path, default=RESULTS, help="where the results go (default: bench/results)")
    options = parser.parse_args()
    if options.clients is None:
        options.clients = 2 * options.ranks
    for name, least in {"ranks": 2, "slots": 1, "spares": 0, "clients": 1, "tokens": 2}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(options, name)}")
    if not all(0 < number < options.ranks for number in options.lose):
        parser.error(f"--lose: of {options.ranks} ranks, 1 to {options.ranks - 1} can be lost at once")
    return options


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def measure(options: argparse.Namespace, place: Path, device: Device, needed: dict[str, str]) -> int:
    head, begun = provenance(), time.monotonic()
    choose, ranks = random.Random(options.seed), str(options.ranks)
    model = make_model(place / "model", size=device.model)
    experts = SIZES[device.model].experts
    arguments = (
        *("--tp-size", ranks, "--dp-size", ranks, "--enable-dp-attention", "--ep-size", ranks, "--ep-backend", "eep"),
        *("--eep-redundant-experts", str(options.slots * options.ranks - experts), "--eep-backup", options.backup),
        *("--eep-spares", str(options.spares), "--eep-timeout-ms", "30000", "--incremental-streaming-output"),
        *(FEW_GRAPHS if device.shared else ()),
    )
    say(f"starting SGLang with {options.ranks} ranks")
    server = Server(model, arguments, place / "server.log", needed, place / "d", device)
    with server:
        say(f"it answers after {time.monotonic() - begun:.0f} s; choosing prompts")
        prompts = choose_prompts(server.url, choose, options.tokens, device)
        load = Load.with_reference(server.url, prompts, tokens=options.tokens, clients=options.clients)
        story = Story(place / "d", load, say=lambda text: None)
        if not story.wait_until_all_run(options.ranks, BACK_WITHIN):
            raise RuntimeError(f"not all of the {options.ranks} ranks run after {BACK_WITHIN:.0f} s")
        losses: list[tuple[Loss, dict[str, int]]] = []
        with load:
            time.sleep(WINDOW)
            for number in options.lose:
                if losses and time.monotonic() - begun > options.within:
                    say(f"the loss of {number} ranks and what follows is left out: {options.within:.0f} s are over")
                    break
                wait_for_spares(story, options.spares)
                say(f"{number} of {options.ranks} ranks are lost next")
                time.sleep(2 * WINDOW)
                losses.append(lose(story, server, choose.sample(range(options.ranks), number), options.ranks))
                loss, brought = losses[-1]
                say(
                    f"{number} of {options.ranks} lost: survivors run after {1e3 * (loss.running - loss.at):.0f} ms, all are "
                    f"back after {loss.back - loss.at:.2f} s; brought in: {brought}"
                )
            time.sleep(3 * WINDOW)  # the last loss has a window after it, too
        story.close()
    left = server.leftovers()
    head["setting"] = {
        **{
            name: getattr(options, name)
            for name in ("device", "ranks", "slots", "backup", "spares", "clients", "tokens")
        },
        "experts": experts,
        **describe_server(device, arguments),
    }
    head["requests"] = describe_requests(load)
    times = load.token_times()
    told = {"losses": [{**loss.told(times), "brought_in": brought} for loss, brought in losses]}
    text = page(head, told)
    say(text)
    write_results(options.out / f"shrink-{options.device}-{options.ranks}", {**head, **told}, text)
    return exit_code(load, left)


def wait_for_spares(story: Story, count: int) -> None:
    """Says how many there are meanwhile. RuntimeError if there are not so many in time."""
    seen, end = -1, time.monotonic() + SPARES_WITHIN
    while (ready := len(story.target.spares())) < count:
        if ready != seen:
            say(f"{ready} of {count} spares are ready")
            seen = ready
        if time.monotonic() > end:
            raise RuntimeError(
                f"{ready} of {count} spares were ready after {SPARES_WITHIN:.0f} s: the server's log may say why; or ask for "
                "fewer with --spares"
            )
        time.sleep(0.2)


def lose(story: Story, server: Server, lost: list[int], ranks: int) -> tuple[Loss, dict[str, int]]:
    """And what the survivors brought in, so that they could go on."""
    before, known = len(server.log), story.target.ranks()
    lives = {rank: known[rank].incarnation for rank in lost}
    faults = [kill_now(story, rank) for rank in lost]
    if not story.wait_until_back(ranks, lives, BACK_WITHIN):
        raise RuntimeError(f"ranks {lost} were lost and did not all come back within {BACK_WITHIN:.0f} s")
    loss = loss_of(story.views, lives, faults[0].at)
    assert loss is not None
    return loss, brought_in(lines_until(server.log[before:], loss.epoch))


if __name__ == "__main__":
    sys.exit(main())
