/* The view change, small enough to look at every interleaving: two hosts with two ranks each, two faults (a rank dies,
 * or a host's lease ends), one relaunch. What is modelled is what eep/membership does: one record changed only by
 * compare-and-swap, one report per host, a coordinator that anybody may replace when its lease is gone.
 *
 * Reading the record, reading the reports and swapping are separate steps, so a host may always act on what is no longer
 * so. Build with -DBROKEN_SWAP or -DREMOVE_UNSEEN to see the checks fail.
 */

#define RANKS 4
#define HOSTS 2
#define EPOCHS 10
#define NOBODY 255
#define host_of(rank) (rank / 2)
#define bit(rank) (1 << (rank))
#define has(mask, rank) ((mask & bit(rank)) != 0)

/* The record. */
byte serial, epoch, members, coordinator;
bool running = true;
byte incarnation[RANKS], granted[RANKS];

/* The reports: what each host has told, for as long as its lease stands. */
bool leased[HOSTS] = true;
byte told_alive[HOSTS], told_ready[HOSTS], told_settled[HOSTS];
bool told_broken[HOSTS];

/* The world. */
bool up[RANKS], ready[RANKS];
byte life[RANKS];
byte faults = 2, relaunches = 1;

/* What the checks remember. */
byte view_of[EPOCHS] = NOBODY;
byte removed_life[RANKS];   /* the highest incarnation that was ever taken out, plus one */
bool lapsed[HOSTS];

inline check_commit(new_epoch, new_members) {
    assert(new_epoch == epoch || new_epoch == epoch + 1);
    assert(new_epoch < EPOCHS);
    assert(view_of[new_epoch] == NOBODY || view_of[new_epoch] == new_members);
    view_of[new_epoch] = new_members;
    r = 0;
    do
    :: r == RANKS -> break
    :: else ->
        if
        :: has(members, r) && !has(new_members, r) ->
            /* Taken out: it is dead, or its host had lost its lease. */
            assert(!up[r] || life[r] != incarnation[r] || lapsed[host_of(r)]);
            removed_life[r] = incarnation[r] + 1
        :: else -> skip
        fi;
        r++
    od
}

proctype Host(byte me) {
    byte r, other;
    byte my_serial, my_epoch, my_members, my_coordinator;   /* the record as last read */
    bool my_running;
    byte my_incarnation[RANKS], my_granted[RANKS];
    byte alive, rdy, settled_all, next_members;             /* the reports as last read */
    bool broken, change, held;
    other = 1 - me;
end:
    do
    :: atomic { serial != my_serial || (leased[me] && held) ->
        /* Look: take over the record, and do as it says. */
        my_serial = serial; my_epoch = epoch; my_members = members;
        my_running = running; my_coordinator = coordinator;
        r = 0;
        do
        :: r == RANKS -> break
        :: else ->
            my_incarnation[r] = incarnation[r]; my_granted[r] = granted[r];
            if
            :: host_of(r) == me && up[r] && !has(members, r) && incarnation[r] >= life[r] -> up[r] = false /* fence */
            :: else -> skip
            fi;
            r++
        od;
        held = false }

    :: atomic { leased[me] ->
        /* Report what is so, if it is news. */
        alive = 0; rdy = 0; broken = false;
        r = 2 * me;
        do
        :: r == 2 * me + 2 -> break
        :: else ->
            if
            :: up[r] -> alive = alive | bit(r); if :: ready[r] -> rdy = rdy | bit(r) :: else -> skip fi
            :: else -> if :: has(my_members, r) -> broken = true :: else -> skip fi
            fi;
            r++
        od;
        if
        :: told_alive[me] != alive || told_ready[me] != rdy || (!broken && told_settled[me] != my_epoch) ->
            told_alive[me] = alive; told_ready[me] = rdy;
            /* Settled: every rank of mine in this view is alive and has applied it. */
            if :: !broken -> told_settled[me] = my_epoch :: else -> skip fi
        :: else -> skip
        fi }

    :: !leased[me] -> atomic {
        /* The lease ended: hold, then register again with a report of what is so. */
        held = true; leased[me] = true }

    :: atomic { leased[me] && my_coordinator != me && !leased[my_coordinator] && serial == my_serial ->
        coordinator = me; serial++ }                       /* take over */

    :: atomic { leased[me] && my_coordinator == me ->
        /* Read the reports. */
        alive = 0; rdy = 0; settled_all = true;
        r = 0;
        do
        :: r == RANKS -> break
        :: else ->
            if
            :: leased[host_of(r)] ->
                alive = alive | (told_alive[host_of(r)] & bit(r)); rdy = rdy | (told_ready[host_of(r)] & bit(r));
                if :: has(my_members, r) && told_settled[host_of(r)] != my_epoch -> settled_all = false :: else -> skip fi
            :: else -> skip
            fi;
            r++
        od };
        atomic {
        /* Decide: the dead go out; else all have settled; else the ready come in. */
        next_members = my_members & alive;
#ifdef REMOVE_UNSEEN
        if :: my_members != 0 && faults == 0 -> next_members = my_members & (my_members - 1) :: else -> skip fi;
#endif
        change = false;
        if
        :: next_members != my_members -> change = true
        :: else ->
            if
            :: !my_running && settled_all -> skip
            :: my_running ->
                r = 0;
                do
                :: r == RANKS -> break
                :: else ->
                    if
                    :: has(rdy, r) && !has(my_members, r) && my_granted[r] > my_incarnation[r] ->
                        next_members = next_members | bit(r); change = true
                    :: else -> skip
                    fi;
                    r++
                od
            :: else -> skip
            fi
        fi };
        atomic {
        /* Swap, if nobody was faster. */
        if
#ifndef BROKEN_SWAP
        :: serial != my_serial -> skip
#endif
        :: else ->
            if
            :: change ->
                check_commit(my_epoch + 1, next_members);
                r = 0;
                do
                :: r == RANKS -> break
                :: else ->
                    if
                    :: has(next_members, r) && !has(my_members, r) ->
                        /* It comes in as it was granted, and never as anything that was taken out. */
                        assert(my_granted[r] >= removed_life[r]);
                        incarnation[r] = my_granted[r]
                    :: else -> skip
                    fi;
                    r++
                od;
                epoch = my_epoch + 1; members = next_members; serial++;
                running = (next_members == 0)
            :: !change && !my_running && settled_all && next_members == my_members ->
                check_commit(my_epoch, my_members);
                running = true; serial++
            :: else -> skip
            fi
        fi }
    od
}

/* A rank that is up gets ready; one that runs does so under a view that all its peers have settled in. */
proctype Rank(byte me) {
end:
    do
    :: atomic { up[me] && !ready[me] -> ready[me] = true }
    od
}

proctype Trouble() {
    byte r;
end:
    do
    :: atomic { faults > 0 && epoch > 0 -> faults--;
        if
        :: up[0] -> up[0] = false
        :: up[1] -> up[1] = false
        :: up[2] -> up[2] = false
        :: up[3] -> up[3] = false
        :: leased[0] -> leased[0] = false; lapsed[0] = true
        :: leased[1] -> leased[1] = false; lapsed[1] = true
        fi }
    :: atomic { relaunches > 0 && epoch > 0 ->
        /* A supervisor launches only what is dead and out, as an incarnation that was never granted before. */
        if
        :: !up[0] && !has(members, 0) -> r = 0; relaunches--; granted[r]++; life[r] = granted[r]; serial++; ready[r] = false; up[r] = true
        :: !up[3] && !has(members, 3) -> r = 3; relaunches--; granted[r]++; life[r] = granted[r]; serial++; ready[r] = false; up[r] = true
        :: else -> skip
        fi }
    :: faults == 0 && relaunches == 0 -> break
    od
}

init {
    byte r;
    atomic {
        /* Everybody has been launched as incarnation 1 and nobody is in yet. */
        r = 0;
        do
        :: r == RANKS -> break
        :: else -> granted[r] = 1; life[r] = 1; up[r] = true; r++
        od;
        view_of[0] = 0;
        run Host(0); run Host(1);
        run Rank(0); run Rank(1); run Rank(2); run Rank(3);
        run Trouble()
    }
}

#define in_as_it_should(rank) (has(members, rank) == up[rank])
#define whole (running && in_as_it_should(0) && in_as_it_should(1) && in_as_it_should(2) && in_as_it_should(3))

/* When the faults are over, the instance runs again with everybody who is up. */
ltl recovers { [] (faults == 0 -> <> whole) }
