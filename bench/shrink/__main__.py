"""How a server of many ranks gets over the loss of several at once: 1, 2, 4 or 8 of 8 or 16.

Starts the server, drives a load whose every token is checked, and kills so many ranks at once, the larger numbers later, each
time when all are back. Told are of each loss: the time until the survivors run again, where the experts come from that they
bring in, how many tokens per second they make until the ranks are back, when these are, and when the server makes 95 % of the
tokens per second that it made before.

Writes shrink-DEVICE-RANKS.json and .md into --out. The exit code is 0 only if no request failed, no token was wrong and
nothing was left over.
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
from bench.failover.kills import brought_in, kill_now, need_spares
from bench.shrink.loss import WINDOW, Loss, lines_until, loss_of
from bench.shrink.report import page
from eep.drill.devices import DEVICES, Device
from eep.drill.load import Load
from eep.drill.models.checkpoint import make_model
from eep.drill.models.model_sizes import SIZES
from eep.drill.sglang_server import Server
from eep.drill.story import Story

WITHIN = 300.0
"""Seconds for lost ranks to be back."""


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
    head = provenance()
    choose, ranks = random.Random(options.seed), str(options.ranks)
    model = make_model(place / "model", size=device.model)
    experts = SIZES[device.model].experts
    arguments = (
        *("--tp-size", ranks, "--dp-size", ranks, "--enable-dp-attention", "--ep-size", ranks, "--ep-backend", "eep"),
        *("--eep-redundant-experts", str(options.slots * options.ranks - experts), "--eep-backup", options.backup),
        *("--eep-spares", str(options.spares), "--eep-timeout-ms", "30000", "--incremental-streaming-output"),
    )
    say(f"starting SGLang with {options.ranks} ranks")
    server = Server(model, arguments, place / "server.log", needed, place / "d", device)
    with server:
        prompts = choose_prompts(server.url, choose, options.tokens, device)
        load = Load.with_reference(server.url, prompts, tokens=options.tokens, clients=options.clients)
        story = Story(place / "d", load, say=lambda text: None)
        story.wait_until_all_run(options.ranks)
        losses: list[tuple[Loss, dict[str, int]]] = []
        with load:
            time.sleep(WINDOW)
            for number in options.lose:
                need_spares(story.target, options.spares)
                say(f"{number} of {options.ranks} ranks are lost next")
                time.sleep(2 * WINDOW)
                losses.append(lose(story, server, choose.sample(range(options.ranks), number), options.ranks))
                say(f"{number} of {options.ranks} lost, and back after {losses[-1][0].back - losses[-1][0].at:.2f} s")
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


def lose(story: Story, server: Server, lost: list[int], ranks: int) -> tuple[Loss, dict[str, int]]:
    """And what the survivors brought in, so that they could go on."""
    before, known = len(server.log), story.target.ranks()
    lives = {rank: known[rank].incarnation for rank in lost}
    faults = [kill_now(story, rank) for rank in lost]
    if not story.wait_until_back(ranks, lives, WITHIN):
        raise RuntimeError(f"ranks {lost} were lost and did not all come back")
    loss = loss_of(story.views, lives, faults[0].at)
    assert loss is not None
    return loss, brought_in(lines_until(server.log[before:], loss.epoch))


if __name__ == "__main__":
    sys.exit(main())
