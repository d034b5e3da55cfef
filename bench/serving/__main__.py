"""Compares four ranks with one on the same device, and shows where the time of their steps goes.

For each it starts a server with a random model and runs ``python -m sglang.bench_serving`` with random prompts. On a GPU it
also profiles steps that prefill and steps that decode. It writes serving-DEVICE.json and .md into the folder of --out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.common.arguments import RESULTS, make_parser
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.serving import step_profile
from eep.drill.devices import DEVICES, Device
from eep.drill.load import ask
from eep.drill.models.checkpoint import make_model
from eep.drill.models.model_sizes import SIZES
from eep.drill.sglang_server import FOUR_RANKS, ONE_RANK, Server

PREFILLED = 512
"""The most tokens that a rank prefills in a step. SGLang divides its flag by the number of ranks."""
SERVERS = {
    "one rank": (*ONE_RANK, "--chunked-prefill-size", str(PREFILLED)),
    "four ranks": (*FOUR_RANKS, "--chunked-prefill-size", str(4 * PREFILLED), "--eep-timeout-ms", "20000"),
}
FIGURES = {
    "output_throughput": "output tokens per second",
    "mean_ttft_ms": "mean time to the first token, ms",
    "p99_ttft_ms": "p99 of that, ms",
    "median_tpot_ms": "median time per token after it, ms",
    "p99_itl_ms": "p99 of the time between tokens, ms",
}
STEPS = {"prefill": 1, "decode": 128}
"""How many tokens each request asks for while steps of a kind are profiled."""
PROFILED = 20
BEFORE_PROFILE = 3.0


@dataclass(frozen=True)
class Workload:
    prompts: int
    concurrency: int
    input_tokens: int
    output_tokens: int


def main() -> int:
    options = parse()
    check_bench()
    device, size = DEVICES[options.device], options.size
    load = Workload(options.prompts, options.concurrency, options.input, options.output)
    found: dict[str, Any] = {**provenance(), "servers": {}}
    found["setting"] = {
        **{"device": options.device, "sglang": importlib.metadata.version("sglang"), "dtype": options.dtype},
        **{"model": str(SIZES[size]), "workload": asdict(load)},
    }
    with tempfile.TemporaryDirectory(prefix="eep-bench-") as place, device.prepared() as needed:
        say(f"making a random model: {SIZES[size]}")
        model = make_model(Path(place, "model"), size=size)
        for name, flags in SERVERS.items():
            say(f"starting SGLang with {name}")
            log = Path(place, name.replace(" ", "-"))
            flags = (*flags, "--dtype", options.dtype)
            environment = {**(needed if "--ep-backend" in flags else {}), "EEP_CUDA_FLOAT32": "0"}
            environment["EEP_ALLOW_ROUTES"] = "/start_profile,/stop_profile"
            with Server(model, flags, log, environment, device=device) as server:
                found["servers"][name] = measure(server, model, load, Path(place), device)
    write(options, found)
    return 0


def parse() -> argparse.Namespace:
    parser = make_parser(
        "bench.serving",
        __doc__,
        "Needs SGLang, with what sglang.bench_serving imports.\n\n"
        "examples:\n"
        "  python -m bench.serving --device cuda\n"
        "  python -m bench.serving --size tiny --prompts 16 --concurrency 4 --out build   does it work?",
    )
    parser.add_argument("--device", choices=sorted(DEVICES), default="cpu", help="where the ranks run (default: cpu)")
    parser.add_argument(
        "--size", choices=sorted(SIZES), default="large", help="size of the random model (default: large)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="type of weights and activations (default: bfloat16)")
    parser.add_argument("--prompts", type=int, default=256, help="how many requests (default: 256)")
    parser.add_argument("--concurrency", type=int, default=32, help="how many requests at once (default: 32)")
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer (default: 128)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: bench/results)")
    return parser.parse_args()


def check_bench() -> None:
    """Ends early if SGLang's benchmark cannot start: it imports packages that serving does not need."""
    command = [sys.executable, "-m", "sglang.bench_serving", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(
            f"sglang.bench_serving does not start; install what it lacks: {done.stderr.strip().rpartition(chr(10))[2]}"
        )


def measure(server: Server, model: Path, load: Workload, place: Path, device: Device) -> dict[str, Any]:
    bench(server, model, Workload(2 * load.concurrency, load.concurrency, load.input_tokens, load.output_tokens), place)
    told = bench(server, model, load, place)
    found: dict[str, Any] = {name: round(float(told[name]), 2) for name in FIGURES}
    say(", ".join(f"{FIGURES[name]} {value}" for name, value in found.items()))
    if device.name == "cuda":
        found["steps"] = {kind: profile_steps(server, kind, load, place) for kind in STEPS}
    return found


def bench(server: Server, model: Path, load: Workload, place: Path) -> dict[str, Any]:
    """One run of SGLang's benchmark; the first run of a server warms it up."""
    results = place / "bench.jsonl"
    results.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", server.url),
        *("--model", str(model), "--tokenizer", str(model), "--dataset-name", "random-ids", "--tokenize-prompt"),
        *("--random-range-ratio", "1.0", "--random-input-len", str(load.input_tokens)),
        *("--random-output-len", str(load.output_tokens), "--num-prompts", str(load.prompts)),
        *("--max-concurrency", str(load.concurrency), "--disable-tqdm", "--output-file", str(results)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode or not results.exists():
        raise RuntimeError(f"sglang.bench_serving ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    told: dict[str, Any] = json.loads(results.read_text().splitlines()[-1])
    if told["completed"] != load.prompts:
        raise RuntimeError(f"the server answered only {told['completed']} of {load.prompts} requests")
    return told


def profile_steps(server: Server, kind: str, load: Workload, place: Path) -> dict[str, Any]:
    """Profiles the first rank while all of the load is of one kind."""
    folder = place / f"profile-{server.port}-{kind}"
    folder.mkdir()
    choose, ends = random.Random(1), threading.Event()
    prompts = [[choose.randrange(3, 250) for _ in range(load.input_tokens)] for _ in range(load.concurrency)]

    def stream(prompt: list[int]) -> None:
        while not ends.is_set():
            ask(server.url, prompt, STEPS[kind])

    threads = [threading.Thread(target=stream, args=(prompt,), daemon=True) for prompt in prompts]
    for thread in threads:
        thread.start()
    try:
        time.sleep(BEFORE_PROFILE)
        post(server, "/start_profile", {"output_dir": str(folder), "num_steps": PROFILED, "activities": ["GPU"]})
        trace = wait_for_trace(folder)
    finally:
        ends.set()
        for thread in threads:
            thread.join(120)
    told = step_profile.profile(step_profile.read(trace), PROFILED)
    say(f"{kind}: {told.wall / 1e3:.2f} ms a step, of which {told.busy / 1e3:.2f} with a kernel of rank 0 running")
    return asdict(told)


def wait_for_trace(folder: Path, within: float = 60.0) -> Path:
    """Waits for the trace of the first rank until it has its full length."""
    end, last = time.monotonic() + within, -1
    while time.monotonic() < end:
        traces = sorted(folder.rglob("*TP-0*.json.gz")) or sorted(folder.rglob("*.json.gz"))
        if traces and traces[0].stat().st_size == last:
            return traces[0]
        last = traces[0].stat().st_size if traces else -1
        time.sleep(1.0)
    raise RuntimeError(f"SGLang wrote no trace within {within:.0f} s")


def post(server: Server, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=120).close()


def write(options: argparse.Namespace, found: dict[str, Any]) -> None:
    text = page(found)
    say(text)
    write_results(options.out / f"serving-{options.device}", found, text)


def page(found: dict[str, Any]) -> str:
    machine, setting, servers = found["machine"], found["setting"], found["servers"]
    load = setting["workload"]
    lines = [
        f"# Four ranks against one on the same device, {setting['device']}",
        "",
        f"`{found['command']}`, commit {found['commit']}, {found['date']}.",
        f"{machine.get('gpu') or machine['cpu']}; torch {machine['torch']}, SGLang {setting['sglang']}, a random model: "
        f"{setting['model']}; {setting['dtype']}.",
        f"{load['prompts']} requests, {load['concurrency']} at once, {load['input_tokens']} tokens in and "
        f"{load['output_tokens']} out, by `sglang.bench_serving`. A rank prefills at most {PREFILLED} tokens in a step.",
        "",
        f"| | {' | '.join(servers)} | four/one |",
        "|---|---:|---:|---:|",
    ]
    for figure, text in FIGURES.items():
        one, four = (servers[name][figure] for name in SERVERS)
        lines.append(f"| {text} | {one:.1f} | {four:.1f} | {four / one:.2f} |")
    rows = [(name, kind, told) for name in servers for kind, told in servers[name].get("steps", {}).items()]
    if rows:
        lines += [
            "",
            f"A step of the first rank, over {PROFILED} steps while all requests are in one phase, in milliseconds. *Idle*: "
            "the device has nothing of this rank to do. *Exchange*: dispatch and combine, the wait for other ranks included.",
            "",
            "| | steps | a step | idle | exchange | other kernels | kernels | longest |",
            "|---|---|---:|---:|---:|---:|---:|---|",
        ]
    for name, kind, told in rows:
        wall, busy, exchange = (told[part] / 1e3 for part in ("wall", "busy", "exchange"))
        longest = ", ".join(f"{kernel} {time / 1e3:.2f}" for kernel, time in told["largest"][:3])
        lines.append(
            f"| {name} | {kind} | {wall:.2f} | {wall - busy:.2f} | {exchange:.2f} | {busy - exchange:.2f} | "
            f"{told['kernels']:.0f} | {longest} |"
        )
    for name, kind, told in rows:
        often = ", ".join(f"{kernel} {count:.1f}" for kernel, count in told["often"])
        lines += ["", f"Kernels started in a step, {name}, {kind}: {often}."]
    return "\n".join(lines) + "\n"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
