/* The view change, small enough to look at every interleaving: two hosts with two ranks each, two faults (a rank dies,
 * or a host's lease ends), one join. What is modelled is what eep/membership does: one record that is changed only by
 * compare-and-swap, one report per host, a coordinator that any host may replace when its lease is gone.
 *
 * Reading the record, deciding on the reports and swapping are separate steps, so a host may always act on what is no
 * longer so. Build with -DBROKEN_SWAP or -DREMOVE_UNSEEN to see the checks fail.
 */

#define RANKS 4
#define HOSTS 2
#define EPOCHS 10
#define NOTHING 255
#define host_of(rank) ((rank) / 2)
#define bit(rank) (1 << (rank))
#define has(mask, rank) (((mask) & bit(rank)) != 0)
#define ranks_of(host) (3 << (2 * (host)))

/* The record. It starts formed and running. */
byte serial = 1, epoch = 1, members = 15, coordinator = 0;
bool running = true;
byte incarnation[RANKS] = 1, granted[RANKS] = 1;

/* The reports: what each host has told, good for as long as its lease stands. */
bool leased[HOSTS] = true;
byte told_alive[HOSTS], told_settled[HOSTS] = 1;

/* The world: which processes are up, and as which incarnation. */
byte up = 15;
byte life[RANKS] = 1;
byte faults = 2, joins = 1;

/* The record as each host last read it. */
typedef Record { byte serial, epoch, members, coordinator; bool running }
Record seen[HOSTS];

/* What the checks remember. */
byte view_of[EPOCHS] = NOTHING;
byte removed[RANKS];            /* the highest incarnation that was taken out */
bool lapsed[HOSTS];             /* whether a host's lease has ever ended */

#ifdef BROKEN_SWAP
#define SWAPS(expected) true
#else
#define SWAPS(expected) (serial == expected)
#endif

/* Used within one atomic step only. */
hidden byte r, alive, settled;

inline commit(new_epoch, new_members, new_running) {
    assert(new_epoch == epoch || new_epoch == epoch + 1);
    assert(view_of[new_epoch] == NOTHING || view_of[new_epoch] == new_members);
    view_of[new_epoch] = new_members;
    for (r : 0 .. RANKS - 1) {
        if
        :: has(members, r) && !has(new_members, r) ->
            /* Taken out: it is dead, or its host had lost its lease. */
            assert(!has(up, r) || life[r] != incarnation[r] || lapsed[host_of(r)]);
            removed[r] = incarnation[r]
        :: !has(members, r) && has(new_members, r) ->
            /* Let in: as something that was never taken out. */
            assert(granted[r] > removed[r]);
            incarnation[r] = granted[r]
        :: else
        fi
    }
    epoch = new_epoch; members = new_members; running = new_running; serial++
}

/* The duties of a host. They are separate processes, so that fairness means that none of them is put off for ever. */

proctype Follow(byte me) {
end:
    do
    :: atomic { serial != seen[me].serial ->
        /* Take over the record, and fence the ranks that are not in it. */
        seen[me].serial = serial; seen[me].epoch = epoch; seen[me].members = members;
        seen[me].running = running; seen[me].coordinator = coordinator;
        for (r : 2 * me .. 2 * me + 1) {
            if
            :: has(up, r) && !has(members, r) && incarnation[r] >= life[r] -> up = up & ~bit(r)
            :: else
            fi
        } }
    od
}

proctype Report(byte me) {
end:
    do
    :: atomic { leased[me] && (told_alive[me] != (up & ranks_of(me)) ||
                (told_settled[me] != seen[me].epoch && (seen[me].members & ranks_of(me) & ~up) == 0)) ->
        /* Who is alive; and whether all of mine that are in have applied the view. */
        told_alive[me] = up & ranks_of(me);
        if :: (seen[me].members & ranks_of(me) & ~up) == 0 -> told_settled[me] = seen[me].epoch :: else fi }
    :: atomic { !leased[me] ->
        /* Register again, with a report of what is so. */
        told_alive[me] = up & ranks_of(me); leased[me] = true }
    od
}

proctype Coordinate(byte me) {
    Record built_on;
    byte next;
    bool decided, settle;
end:
    do
    :: atomic { leased[me] && seen[me].coordinator != me && !leased[1 - me] && serial == seen[me].serial ->
        coordinator = me; serial++ }

    :: atomic { leased[me] && seen[me].coordinator == me && !decided ->
        /* Decide on the reports as they are now: the dead go out; or all have settled; or the ready come in. */
        alive = (leased[0] -> told_alive[0] : 0) | (leased[1] -> told_alive[1] : 0);
        settled = ((seen[me].members & 3) == 0 || told_settled[0] == seen[me].epoch) &&
                  ((seen[me].members & 12) == 0 || told_settled[1] == seen[me].epoch);
        next = seen[me].members & alive;
#ifdef REMOVE_UNSEEN
        if :: faults == 0 && seen[me].running -> next = seen[me].members & (seen[me].members - 1) :: else fi;
#endif
        if
        :: next != seen[me].members -> decided = true
        :: next == seen[me].members && !seen[me].running && settled -> decided = true; settle = true
        :: next == seen[me].members && seen[me].running ->
            for (r : 0 .. RANKS - 1) {
                if
                :: has(alive, r) && granted[r] > incarnation[r] -> next = next | bit(r); decided = true
                :: else
                fi
            }
        :: else
        fi;
        if
        :: decided -> built_on.serial = seen[me].serial; built_on.epoch = seen[me].epoch; built_on.members = seen[me].members
        :: else -> next = 0
        fi }

    :: atomic { decided ->
        /* Swap, unless another host was faster. */
        if
        :: SWAPS(built_on.serial) ->
            if
            :: settle -> commit(built_on.epoch, built_on.members, true)
            :: else -> commit((built_on.epoch + 1), next, (next == 0))
            fi
        :: else
        fi;
        decided = false; settle = false; next = 0;
        built_on.serial = 0; built_on.epoch = 0; built_on.members = 0 }
    od
}

proctype Trouble() {
end:
    do
    :: atomic { faults > 0 -> faults--;
        if
        :: has(up, 0) -> up = up & ~bit(0)
        :: has(up, 3) -> up = up & ~bit(3)
        :: leased[0] -> leased[0] = false; lapsed[0] = true
        :: leased[1] -> leased[1] = false; lapsed[1] = true
        fi }
    :: atomic { joins > 0 && running && (up | members) != 15 -> joins--;
        /* A dead rank that is out is launched again, as an incarnation that was never granted before. */
        if
        :: !has(up | members, 0) -> granted[0]++; life[0] = granted[0]; up = up | bit(0)
        :: !has(up | members, 3) -> granted[3]++; life[3] = granted[3]; up = up | bit(3)
        :: else
        fi;
        serial++ }
    od
}

init {
    atomic {
        told_alive[0] = 3; told_alive[1] = 12; view_of[1] = 15;
        for (r : 0 .. HOSTS - 1) {
            seen[r].serial = 1; seen[r].epoch = 1; seen[r].members = 15; seen[r].running = true;
            run Follow(r); run Report(r); run Coordinate(r)
        }
        run Trouble()
    }
}

#define whole (running && members == up)

/* When the faults are over, the instance runs again, with exactly those who are up. */
ltl recovers { [] (faults == 0 -> <> whole) }
