"""How many expert slots there are, and how many lost ranks they cover. Decisions only.

Every rank has the same number of slots, at fixed addresses for as long as it lives; repair fills them in place.
"""

from __future__ import annotations

import argparse


def redundant_experts(arguments: argparse.Namespace, experts: int | None, lost: int = 1) -> int:
    """How many slots the ranks at the start have beyond the ``experts`` of the model, which are None if not known. Unless an
    operator says, so many that the others hold every expert when any ``lost`` of them are lost at once."""
    ranks, asked = arguments.tp_size, arguments.eep_redundant_experts
    if asked is None:
        asked = getattr(arguments, "ep_num_redundant_experts", 0) or None
    if asked is None:
        return 0 if experts is None else -(-experts // max(1, ranks - lost)) * ranks - experts
    if asked < 0:
        raise SystemExit(f"--eep-redundant-experts {asked}: give 0 or more")
    if experts is not None and (spare := (experts + asked) % ranks):
        raise SystemExit(
            f"--eep-redundant-experts {asked}: with the {experts} experts of this model that makes {experts + asked} slots, "
            f"which {ranks} ranks cannot share evenly; ask for {asked + ranks - spare}"
            + (f" or {asked - spare}" if asked >= spare else "")
        )
    return int(asked)


def redundant_in_all(redundant: int, experts: int | None, ranks: int, max_ranks: int) -> int:
    """The same over ``max_ranks``: each rank that is added has as many slots as each of the ``ranks`` at the start."""
    if max_ranks == ranks:
        return redundant
    if experts is None:
        raise SystemExit(
            f"--eep-max-ranks {max_ranks}: the number of experts cannot be read from the configuration of this model, so eep "
            f"cannot lay out slots for ranks after the first {ranks}; leave out --eep-max-ranks"
        )
    return (experts + redundant) // ranks * max_ranks - experts


def fewest_ranks(experts: int, slots_per_rank: int) -> int:
    """How many ranks it takes to hold every expert."""
    return -(-experts // slots_per_rank)


def describe_capacity(experts: int, slots_per_rank: int, ranks: int, on_lost_coverage: str) -> str:
    """One sentence: how many ranks may be lost before experts are missing, and what happens then."""
    covered = ranks - fewest_ranks(experts, slots_per_rank)
    slots = f"{experts} experts in {slots_per_rank * ranks} slots, {slots_per_rank} on each of {ranks} ranks"
    beyond = {
        "refuse": "all wait until enough ranks are back",
        "mask": "those that are left serve without the least used experts",
        "make-room": "those that are left give memory of their KV caches to more slots",
    }[on_lost_coverage]
    if covered == 0:
        return f"{slots}: every rank is needed; while one is lost, {beyond}"
    which = "any one rank" if covered == 1 else f"any {covered} ranks"
    if covered == ranks - 1:
        return f"{slots}: {which} may be lost, and the last one still holds every expert"
    return f"{slots}: {which} may be lost, and the others hold every expert; with more lost, {beyond}"
