"""Three ways from the current placement to one that covers every expert. Pure, like ``packing``.

``retain`` rewrites the fewest slots. ``spend_moves`` uses a budget of further moves where balance is worst.
``place_from_scratch`` balances as if every slot were empty and then keeps what happens to fit.
"""

from __future__ import annotations

import numpy as np

from eep.experts.placement.balance import even_out
from eep.experts.placement.eviction import evict
from eep.experts.placement.host_spread import can_spread, find_hosts, spread_copies
from eep.experts.placement.packing import (
    EMPTY,
    BoolArray,
    Cluster,
    FloatArray,
    IntArray,
    add_copies,
    count_copies,
    find_owned,
    place_copies,
    rank_loads,
)

# Where evenness has settled on DeepSeek-V3 shapes; further exchanges cost time and change nothing that
# matters.
_EXCHANGES = 24


def fewest_moves(slot_expert: IntArray, experts: int) -> IntArray:
    """``[layers]``: the slots that must be rewritten so that every expert has one and no slot is left idle.

    Each uncovered expert must be written somewhere, and each empty slot must be written; one write can do for
    both.
    """
    empty = (slot_expert == EMPTY).sum(axis=1)
    uncovered = (count_copies(slot_expert, experts) == 0).sum(axis=1)
    return np.asarray(np.maximum(empty, uncovered))


def choose_left_out(before: IntArray, demand: FloatArray) -> BoolArray:
    """The experts for which there is no slot: the least asked for among those that no slot holds now."""
    count = count_copies(before, demand.shape[1])
    uncovered = count == 0
    room = before.shape[1] - (count > 0).sum(axis=1)
    hottest_first = np.argsort(np.where(uncovered, -demand, np.inf), axis=1, kind="stable")
    place_in_line = np.empty_like(hottest_first)
    np.put_along_axis(place_in_line, hottest_first, np.arange(demand.shape[1])[None, :], axis=1)
    return np.asarray(uncovered & (place_in_line >= room[:, None]))


def retain(before: IntArray, demand: FloatArray, missing: BoolArray, cluster: Cluster) -> IntArray:
    """Cover every expert that is not ``missing`` and rewrite the fewest slots.

    An uncovered expert goes to an empty slot, or takes the place of a copy that its expert can best do
    without.
    """
    after = before.copy()
    experts = demand.shape[1]
    count = count_copies(after, experts)
    uncovered = (count == 0) & ~missing
    number = uncovered.sum(axis=1)
    empty = (after == EMPTY).sum(axis=1)
    spare = count.sum(axis=1) - (count > 0).sum(axis=1)
    incoming = np.where(uncovered, demand, 0).sum(axis=1) / np.maximum(number, 1)
    evict(after, demand, np.minimum(np.maximum(number - empty, 0), spare), incoming, cluster)

    count = count_copies(after, experts) + uncovered
    has_room = (after == EMPTY).reshape(len(after), cluster.ranks, -1).any(axis=2)
    owned = find_owned(after, experts, cluster.slots_per_rank)
    # A further copy needs a rank with room that does not hold the expert yet.
    limit = np.minimum((has_room[:, :, None] | owned).sum(axis=1), cluster.max_copies)
    wanted = (after == EMPTY).sum(axis=1) - number
    count = add_copies(count, demand, wanted, np.where(missing, 0, limit), cluster.least_copies)
    place_copies(after, demand, count, cluster)
    if cluster.least_copies > 1 and can_spread(experts, cluster):
        _spread_again(after, (before == EMPTY).all(axis=1), demand, count, cluster)
    even_out(after, after != before, demand, cluster, _EXCHANGES)
    return after


def _spread_again(after: IntArray, fresh: BoolArray, demand: FloatArray, count: IntArray, cluster: Cluster) -> None:
    """Place the ``fresh`` layers once more, in place, that leave an expert with one host: there is room on two for each."""
    one_host = (find_hosts(after, demand.shape[1], cluster).sum(axis=1) < 2).any(axis=1)
    rows = np.flatnonzero(one_host & fresh)
    if len(rows):
        again = np.full_like(after[rows], EMPTY)
        spread_copies(again, demand[rows], cluster)
        place_copies(again, demand[rows], np.maximum(count[rows], 2), cluster)
        after[rows] = again


def spend_moves(budget: int, placed: IntArray, demand: FloatArray, cluster: Cluster) -> None:
    """Rewrite, in place, up to ``budget`` further slots in all to even the layers out, two with each exchange."""
    each, more = divmod(budget // 2, len(placed))
    if not each + more:
        return
    even_out(placed, np.ones_like(placed, dtype=bool), demand, cluster, each)
    busy = rank_loads(placed, demand, count_copies(placed, demand.shape[1]), cluster.slots_per_rank)
    uneven = busy.max(axis=1) / busy.mean(axis=1)
    rows = np.sort(np.argsort(-uneven, kind="stable")[:more])
    if len(rows):
        worst = placed[rows]
        even_out(worst, np.ones_like(worst, dtype=bool), demand[rows], cluster, 1)
        placed[rows] = worst


def place_from_scratch(before: IntArray, demand: FloatArray, missing: BoolArray, cluster: Cluster) -> IntArray:
    """The most even placement this module knows, dealt out so that ranks keep what they can of ``before``.

    Ranks of one host are alike to the balance, so their shares may change hands among them.
    """
    ideal = retain(np.full_like(before, EMPTY), demand, missing, cluster)
    layers, experts = demand.shape
    size = cluster.slots_per_rank
    had = find_owned(before, experts, size).astype(np.float32)
    gets = find_owned(ideal, experts, size).astype(np.float32)
    shares = ideal.reshape(layers, cluster.ranks, size)
    dealt = np.empty_like(shares)
    taken = np.zeros((layers, cluster.ranks), dtype=bool)
    for rank in range(cluster.ranks):
        alike = cluster.host == cluster.host[rank]
        in_common = np.einsum("le,lre->lr", had[:, rank], gets)
        choice = np.where(alike & ~taken, in_common, -1.0).argmax(axis=1)
        taken[np.arange(layers), choice] = True
        dealt[:, rank] = shares[np.arange(layers), choice]
    return _in_their_slots(before.reshape(-1, size), dealt.reshape(-1, size)).reshape(before.shape)


def _in_their_slots(before: IntArray, share: IntArray) -> IntArray:
    """For each rank (a row), its ``share`` with every expert that it already had in the slot where it was."""
    stays = (before[:, :, None] == share[:, None, :]) & (before[:, :, None] != EMPTY)
    result = np.where(stays.any(axis=2), before, EMPTY)
    new = ~stays.any(axis=1) & (share != EMPTY)
    for column in range(share.shape[1]):
        rows = np.flatnonzero(new[:, column])
        result[rows, (result[rows] == EMPTY).argmax(axis=1)] = share[rows, column]
    return result
