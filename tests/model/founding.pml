/*
 * Founding: two masters behind one name (an address that leads to either), who may found a run, and who may lead one on.
 *
 * MODELLED. Two processes, begun and killed in any order (STARTS in all), whatever the name leads to at the moment (it
 * may change at any time); N peers. A process owns the state directory (fence_file.FenceFile) as long as it
 * lives, and cannot begin while another does; it writes the fence, then announces (fence.py, rule 1). Peers without a
 * run found one (Failover._hello, _found); peers of a run that have lost their master resume it (Failover._resume,
 * KnownRuns.refusal), and a majority of the last view is led on in a higher term.
 *
 * ABSTRACTED, and why nothing is lost by it.
 *   One view           all peers that come at founding; what becomes of views is recovery.pml.
 *   Time               a process whose record names a run founds no other until the peers of that have given up
 *                      (failover: hold_s); here they never do.
 *   Messages           one step each: a peer is at one process at a time, and what is under way to one that it has
 *                      left is as if never said.
 * Without a state directory none of this is promised (docs/design/failover.md).
 *
 * PROPERTIES
 *   F1  Never two leaders behind one name at a time, each with peers of its own.
 *   F2  Never a second run founded while peers of one live.
 *   F3  Never two leaders of a run in one term.
 */

#ifndef N
#define N 3
#endif
#ifndef STARTS
#define STARTS 4
#endif
#define M 2
#define BIT(p) (1 << (p))
#define HAS(set, p) (((set) >> (p)) & 1)
#define ALL ((1 << N) - 1)
#define COUNT(s) (((s) & 1) + (((s) >> 1) & 1) + (((s) >> 2) & 1))
#define MAJORITY (N / 2 + 1)

byte up;                      /* processes that live */
byte name;                    /* the one that the name leads to */
byte leads[M], run_of[M];     /* term; 0: vacant. The run's number */
byte led[M];                  /* peers that each leads */
byte here[M], asked[M];       /* peers of a run that have come, and the term that it would lead in */
byte voted[M];
byte term[N], in_run[N];         /* of peers; 0: none */
byte owner = M;               /* of the state directory */
byte fence_run, fence_term;   /* the record in it */
byte knows_run[M], knows_term[M]; /* as each process has read or written it */
byte runs, starts, led_terms;
hidden byte i;

inline check_leaders() {
    assert(!(leads[0] && leads[1] && led[0] && led[1]));   /* F1 */
}

inline remember(m, r, t) {
    knows_run[m] = r; knows_term[m] = t;
#ifndef WITHOUT_FENCE
    fence_run = r; fence_term = t
#endif
}

inline follow(m, p) { led[m] = led[m] | BIT(p); in_run[p] = run_of[m]; term[p] = leads[m] }

#ifdef WITHOUT_LOCK
#define MAY_BEGIN(m) 1
#else
#define MAY_BEGIN(m) (owner == M)
#endif
/* A process whose fence names a run that is not over founds none. */
#define MAY_FOUND(m) (knows_run[m] == 0)
#define UNLED(p) (!HAS(led[0] | led[1], p))

#ifdef WITHOUT_MAJORITY
#define ENOUGH(s) (COUNT(s) > 0)
#else
#define ENOUGH(s) (COUNT(s) >= MAJORITY)
#endif

proctype Process(byte m) {
end:
    do
    :: atomic { !HAS(up, m) && starts < STARTS && MAY_BEGIN(m) ->
begin:  starts++; up = up | BIT(m); owner = m;
        knows_run[m] = fence_run; knows_term[m] = fence_term }
    :: atomic { HAS(up, m) && starts < STARTS ->
kill:   up = up & ~BIT(m);
        leads[m] = 0; run_of[m] = 0; led[m] = 0; here[m] = 0; asked[m] = 0; voted[m] = 0; knows_run[m] = 0; knows_term[m] = 0;
        if
        :: owner == m -> owner = M
        :: else
        fi }
    :: atomic { name != m && starts < STARTS ->
turn:   name = m }
    /* The peers that follow are a majority. */
    :: atomic { HAS(up, m) && leads[m] == 0 && ENOUGH(voted[m]) && asked[m] > knows_term[m] ->
lead:   remember(m, 1, asked[m]);
        leads[m] = asked[m]; run_of[m] = 1; led[m] = voted[m];
        assert(!HAS(led_terms, leads[m]));                 /* F3 */
        led_terms = led_terms | BIT(leads[m]);
        here[m] = 0; voted[m] = 0; asked[m] = 0;
        check_leaders() }
    od
}

proctype Peer(byte p) {
end:
    do
    /* Hello. */
    :: atomic { in_run[p] == 0 && HAS(up, name) && leads[name] == 0 && here[name] == 0 && MAY_FOUND(name) ->
found:  runs++;
        remember(name, runs, 1);
        assert(runs == 1);                                 /* F2 */
        leads[name] = 1; run_of[name] = runs; led_terms = led_terms | BIT(1);
        follow(name, p);
        check_leaders() }
    :: atomic { in_run[p] == 0 && HAS(up, name) && leads[name] ->
join:   follow(name, p) }
    /* Resume: at the process that the name leads to. */
    :: atomic { in_run[p] && UNLED(p) && HAS(up, name) && leads[name] == 0 && !HAS(here[name], p) ->
resume: here[0] = here[0] & ~BIT(p); here[1] = here[1] & ~BIT(p); voted[0] = voted[0] & ~BIT(p); voted[1] = voted[1] & ~BIT(p);
        here[name] = here[name] | BIT(p);
        if
        :: asked[name] <= term[p] || asked[name] <= knows_term[name] ->
            asked[name] = (term[p] > knows_term[name] -> term[p] : knows_term[name]) + 1; voted[name] = 0
        :: else
        fi }
    :: atomic { in_run[p] && HAS(here[0], p) && HAS(up, 0) && leads[0] == 0 && ENOUGH(here[0]) && asked[0] > term[p] && asked[0] < 8 ->
vote:   term[p] = asked[0]; voted[0] = voted[0] | BIT(p) }
    :: atomic { in_run[p] && HAS(here[1], p) && HAS(up, 1) && leads[1] == 0 && ENOUGH(here[1]) && asked[1] > term[p] && asked[1] < 8 ->
        term[p] = asked[1]; voted[1] = voted[1] | BIT(p) }
    od
}

init {
    byte p;
    atomic {
        do
        :: p < N -> run Peer(p); p++
        :: p == N -> break
        od;
        p = 0;
        run Process(0);
        run Process(1)
    }
}
