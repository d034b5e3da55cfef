import os, sys, time, statistics
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
import torch, eep
from eep import native
import multiprocessing as mp

def make(rank, N, T, H, place, wire="bf16"):
    return eep.Buffer(rank, rendezvous=place, max_ranks=N, max_tokens=T, hidden=H, topk=8, local_experts=256//N, wire=wire, device="cuda", timeout_ms=20000)

def setup(b, N, T, H, rank):
    g = torch.Generator().manual_seed(rank)
    idx = torch.rand(T, 256, generator=g).topk(8).indices.cuda()
    return torch.randn(T, H, device="cuda").bfloat16(), idx, torch.rand(T, 8, device="cuda"), torch.empty(T, H, dtype=torch.bfloat16, device="cuda")

def rounds(b, d, R, marks=None):
    x, idx, w, out = d
    for i in range(R):
        if marks: marks[2*i].record()
        t = b.dispatch(x, idx, w)
        if marks: marks[2*i+1].record()
        b.combine(b.combine_input(), t, out=out)
    if marks: marks[-1].record()

def graph(b, d, R, stream, marks=None):
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=stream):
        rounds(b, d, R, marks)
    return g

def streams(N, T, H, wire="bf16", R=20, fixed=0, blocks=0):
    with eep.Rendezvous.temporary() as rv:
        bs = [make(r, N, T, H, rv, wire) for r in range(N)]
        for b in bs: b.connect_ranks(range(N))
        if fixed or blocks:
            for b in bs: native.check(b._library, b._library.eep_tune(b._context, blocks or 132//N, fixed))
        ds = [setup(b, N, T, H, r) for r, b in enumerate(bs)]
        ss = [torch.cuda.Stream() for _ in range(N)]
        torch.cuda.synchronize()
        toks = []
        for b, d, s in zip(bs, ds, ss):
            with torch.cuda.stream(s): toks.append(b.dispatch(*d[:3]))
        for b, d, s, t in zip(bs, ds, ss, toks):
            with torch.cuda.stream(s): b.combine(b.combine_input(), t, out=d[3])
        torch.cuda.synchronize()
        marks = [[torch.cuda.Event(enable_timing=True, external=True) for _ in range(2*R+1)] for _ in range(N)]
        g1 = [graph(b, d, R, s) for b, d, s in zip(bs, ds, ss)]
        g2 = [graph(b, d, R, s, m) for b, d, s, m in zip(bs, ds, ss, marks)]
        ev = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(N)]
        tot = []; D = []; C = []
        for it in range(25):
            for g, s, e in zip(g1, ss, ev):
                with torch.cuda.stream(s): e[0].record(); g.replay(); e[1].record()
            torch.cuda.synchronize()
            if it > 4: tot.append(ev[N-1][0].elapsed_time(ev[N-1][1])*1e3/R)
        for it in range(25):
            for g, s in zip(g2, ss):
                with torch.cuda.stream(s): g.replay()
            torch.cuda.synchronize()
            if it > 4:
                for i in range(3, R):
                    D.append(max(m[2*i].elapsed_time(m[2*i+1]) for m in marks)*1e3); C.append(max(m[2*i+1].elapsed_time(m[2*i+2]) for m in marks)*1e3)
        for b in bs: b.status().raise_if_bad()
        print(f"streams N={N} T={T} H={H} {wire} fixed={fixed} blocks={blocks}: per round {statistics.median(tot):.1f}, with events D {statistics.median(D):.1f} C {statistics.median(C):.1f}", flush=True)
        for b in bs: b.close()

def proc(rank, N, T, H, place, q, wire, R=20):
    b = make(rank, N, T, H, place, wire)
    b.connect_ranks(range(N))
    d = setup(b, N, T, H, rank)
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        b.barrier(); rounds(b, d, 2)
    s.synchronize()
    g1 = graph(b, d, R, s)
    e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    tot = []
    for it in range(25):
        b.barrier()
        with torch.cuda.stream(s):
            e[0].record(); g1.replay(); e[1].record()
        s.synchronize()
        if it > 4: tot.append(e[0].elapsed_time(e[1])*1e3/R)
    b.status().raise_if_bad()
    q.put((rank, statistics.median(tot)))
    b.barrier(); b.close()

def procs(N, T, H, wire="bf16"):
    ctx = mp.get_context("spawn"); q = ctx.Queue()
    with eep.Rendezvous.temporary() as rv:
        ps = [ctx.Process(target=proc, args=(r, N, T, H, str(rv.path), q, wire)) for r in range(N)]
        [p.start() for p in ps]; res = [q.get(timeout=60) for _ in ps]; [p.join() for p in ps]
    print(f"procs N={N} T={T} H={H} {wire}: per round {statistics.median(r[1] for r in res):.1f}", flush=True)

if __name__ == "__main__":
    mode = sys.argv[1]
    if mode == "streams":
        for N in (2, 4, 8):
            for T in (1, 128): streams(N, T, 7168)
        streams(8, 128, 7168, fixed=1); streams(8, 128, 7168, "fp8"); streams(8,128,7168,blocks=8)
    else:
        for N in (2, 4, 8):
            for T in (1, 128): procs(N, T, 7168)
