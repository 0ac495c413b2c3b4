/*
 * Recovery: several masters that peers know by address, terms, votes, recovery reports, views in force, verdicts that
 * are carried over.
 *
 * MODELLED. N peers and two masters that all of them know; a master that dies is begun anew without any memory. At first
 * master 0 leads view FIRST of all peers in term 1. Peers lose their master (it dies, or CUTS times the connection),
 * go to any master, say which views they know of (Resume, PreVote), follow in a higher term (VoteRequest, Vote with the
 * recovery report) when a majority of each quorum view is there, and are led on (Resumed, Flush, Prepare, Install): the
 * rules of recovery_report.py, failover.py, master/leadership.py and peer/machine.py. LOSSES peers die. A master may
 * lose a peer that it no longer hears, and one that it hears (EVICTIONS times). One op of view FIRST is open: its engines
 * are done or not, and whoever finds all done commits by itself as long as it runs.
 *
 * KEEP 0: one group, so that every loss changes the ring, all peers of a new view must answer before it is in force.
 * KEEP 1: each peer in a group of its own, so that no ring changes, and a view is in force without all answers
 * (leadership.py, rule 4). No ops then.
 *
 * ABSTRACTED, and why nothing is lost by it.
 *   Resume, PreVote    one step, with no delay: a peer's views do not change while no master leads it, and one that has
 *                      left again without the master's knowing is what a delayed message would be.
 *   VoteRequest, Vote  one step: what is asked binds nobody before it comes, and a vote under way is one that has not
 *                      been counted yet; the report is what it was at that step.
 *   Connections        FIFO; whoever loses one hears nothing more of it, and the other end hears any part of what was
 *                      under way before it finds that out. Sessions that resume are connections that did not break.
 *   Time               a master goes on with a majority at any time, and loses who does not hear it at any time.
 *   View numbers       a block for each term, as in recovery.block: salts only matter where two lead in one term.
 *   Flushes            an engine that has stopped has told all (completion.pml shows what happens otherwise).
 *
 * PROPERTIES
 *   R1  No two callers hear different verdicts of the op.
 *   R2  Never two leaders in one term.
 *   R3  No rollback: whoever leads knows every view that is in force with an earlier term, or will ever be.
 *   R4  No machine hears what cannot be (ProtocolError).
 *   R5  With one loss at most, all who live are led in one view when nothing more can happen.
 */

#ifndef N
#define N 3
#endif
#ifndef TERMS
#define TERMS 3
#endif
#ifndef LOSSES
#define LOSSES 1
#endif
#ifndef CUTS
#define CUTS 1
#endif
#ifndef EVICTIONS
#define EVICTIONS 0
#endif
#ifndef DEATHS
#define DEATHS 1 /* of masters */
#endif
#ifndef KEEP
#define KEEP 0
#endif

#define M 2
#define NONE M
#define PER_TERM 4
#define VIEWS (PER_TERM * (TERMS + 1))
#define FIRST PER_TERM
#define BIT(p) (1 << (p))
#define HAS(set, p) (((set) >> (p)) & 1)
#define ALL ((1 << N) - 1)
#define COUNT(s) (((s) & 1) + (((s) >> 1) & 1) + (((s) >> 2) & 1) + (((s) >> 3) & 1) + (((s) >> 4) & 1))
#define MAJORITY(s) (COUNT(s) / 2 + 1)
#define TERM_OF(view) ((view) / PER_TERM)
#define AT(m, p) ((m) * N + (p))
#define ONE(view) (BIT(view) & ~1)

mtype = { RESUMED, FLUSH, PREPARE, INSTALL, GOODBYE, REPLY, READY };

chan down[M * N] = [5] of { mtype, short };
chan back[M * N] = [4] of { mtype, byte };

/* Peers. */
byte alive = ALL, ended;      /* ended: they have heard that they were evicted */
byte at[N];                   /* the master that each is connected to */
byte led = ALL;               /* is_led */
byte term[N];
byte view[N];                 /* the installed one */
byte prepared[N];             /* 0: none */
byte answered;                /* the prepared one */
short answers[N];             /* _answered: views that were answered to earlier masters */
/* Their op. */
byte done, halted, heard_commit, settled_commit;
byte committed, aborted;      /* callers */

/* Views: their peers; those in force at somebody. */
byte peers_of[VIEWS];
short in_force;
/* By term: what its leader knows to be, or that may be, in force. */
short known[TERMS + 1];
byte led_terms;

/* Masters. */
byte leads[M];                /* in this term; 0: vacant */
byte members[M];
byte here[M], following[M];   /* gathering: who has come, and who follows */
byte asked[M];                /* the term of the gathering */
short quorum_views[M];
byte m_view[M], m_installed[M];
byte m_flush[M], m_ready[M], m_holders[M];
bit m_changed[M], m_running[M], m_preparing[M], m_commit[M], m_decided[M];
/* What each that is here has said: PreVote, and of the op the report. */
byte s_view[M * N], s_prepared[M * N];
short s_answers[M * N];
byte s_halted[M], s_commit[M];
byte ripe[M];                 /* a majority of each quorum view is here; 2: it follows, too */

byte losses, cuts, evictions, deaths;
bit late;                     /* somebody who lives has come too late */

/* Scratch. */
hidden byte i, j, v, last, expected, set, count, settled_by;
hidden short told, quorum;
hidden byte is_majority, is_newer;

/* Rules 4 and 5 of recovery_report.py. */
#if defined(WITHOUT_MAJORITY)
#define LACKS(all, who, going) (COUNT((all) & (who)) == 0)
#elif defined(WITHOUT_RIVALS)
#define LACKS(all, who, going) (COUNT((all) & (who)) < MAJORITY(all))
#else
#define LACKS(all, who, going) (COUNT((all) & (who)) < MAJORITY(all) || COUNT(all) - COUNT(going) >= MAJORITY(all))
#endif

/* Whose silence rules a view out: whoever had to answer it, and who has heard of it or of a newer one. */
#if KEEP && !defined(WITHOUT_KEPT_RINGS)
#define NEEDED(m, v, p) (s_prepared[AT(m, p)] >= v || s_answers[AT(m, p)] >= BIT(v))
#else
#define NEEDED(m, v, p) 1
#endif

/* recovery_report.quorum_of for these peers, as they have said to master m. */
inline judge(m, who) {
    d_step {
        last = 0; told = 0; settled_by = 0; i = 0;
        do
        :: i < N ->
            if
            :: HAS(who, i) && s_view[AT(m, i)] > last -> last = s_view[AT(m, i)]
            :: else
            fi;
            if
            :: HAS(who, i) -> told = told | s_answers[AT(m, i)] | ONE(s_prepared[AT(m, i)])
            :: else
            fi;
            i++
        :: else -> break
        od;
        quorum = BIT(last); expected = peers_of[last];
#ifdef WITHOUT_PREPARED_VIEWS
        told = 0;
#endif
        v = last + 1;
        do
        :: v < VIEWS ->
            if
            :: HAS(told, v) ->
                /* may_be_in_force: all here that are in it have answered it, and somebody of it is not here. */
                set = 0; i = 0;
                do
                :: i < N ->
                    if
                    :: HAS(who & peers_of[v], i) && !HAS(s_answers[AT(m, i)], v) && NEEDED(m, v, i) -> set = 1
                    :: else
                    fi;
                    i++
                :: else -> break
                od;
                if
                :: !set && (peers_of[v] & ~who) -> quorum = quorum | BIT(v); expected = expected & peers_of[v]
                :: else
                fi
            :: else
            fi;
            v++
        :: else -> break
        od;
        /* Rule 8: whoever has settled its ops by a prepared view stands with it. */
#if !KEEP && !defined(WITHOUT_SETTLED)
        i = 0;
        do
        :: i < N ->
            if
            :: HAS(who & peers_of[last], i) && s_prepared[AT(m, i)] > last && s_prepared[AT(m, i)] > settled_by ->
                settled_by = s_prepared[AT(m, i)]
            :: else
            fi;
            i++
        :: else -> break
        od;
        if
        :: settled_by -> expected = expected & peers_of[settled_by]
        :: else
        fi;
#endif
        expected = expected & who;
        is_majority = (expected != 0); v = 0;
        do
        :: v < VIEWS ->
            if
            :: HAS(quorum, v) && LACKS(peers_of[v], who, expected) -> is_majority = 0
            :: else
            fi;
            v++
        :: else -> break
        od;
        i = 0; v = 0; set = 0; told = 0
    }
}

inline hear(p, is_commit) {
    if
    :: is_commit -> committed = committed | BIT(p); assert(!aborted)  /* R1 */
    :: else -> aborted = aborted | BIT(p); assert(!committed)         /* R1 */
    fi
}

/* A view is in force: every later leader knows that it may be. */
inline put_in_force(id) {
    in_force = in_force | BIT(id);
    d_step {
        i = TERM_OF(id) + 1;
        do
        :: i <= TERMS -> assert(!HAS(led_terms, i) || HAS(known[i], id)); i++ /* R3 */
        :: else -> break
        od;
        i = 0
    }
}

inline tell(m, who, kind, x) {
    j = 0;
    do
    :: j < N && HAS(who & alive, j) && at[j] == m -> assert(nfull(down[AT(m, j)])); down[AT(m, j)] ! kind, x; j++
    :: j < N && !(HAS(who & alive, j) && at[j] == m) -> j++
    :: j == N -> break
    od;
    j = 0
}

inline drain(channel) {
    do
    :: nempty(channel) -> channel ? _, _
    :: empty(channel) -> break
    od
}

/* The master leads no further, and knows nothing. */
inline vacate(m) {
    leads[m] = 0; members[m] = 0; here[m] = 0; following[m] = 0; asked[m] = 0; quorum_views[m] = 0;
    m_view[m] = 0; m_installed[m] = 0; m_flush[m] = 0; m_ready[m] = 0; m_holders[m] = 0;
    m_changed[m] = 0; m_running[m] = 0; m_preparing[m] = 0; m_commit[m] = 0; m_decided[m] = 0;
    s_halted[m] = 0; s_commit[m] = 0; ripe[m] = 0;
    i = 0;
    do
    :: i < N ->
        s_view[AT(m, i)] = 0; s_prepared[AT(m, i)] = 0; s_answers[AT(m, i)] = 0;
        drain(back[AT(m, i)]);
        i++
    :: i == N -> break
    od;
    i = 0
}

inline forget_claim(m, p) {
    here[m] = here[m] & ~BIT(p); following[m] = following[m] & ~BIT(p);
    s_halted[m] = s_halted[m] & ~BIT(p); s_commit[m] = s_commit[m] & ~BIT(p);
    s_view[AT(m, p)] = 0; s_prepared[AT(m, p)] = 0; s_answers[AT(m, p)] = 0
}

/* Who is here or follows has changed. */
inline recheck(m) {
    judge(m, here[m]);
    ripe[m] = is_majority; j = last;
    judge(m, following[m]);
    if
    :: ripe[m] && is_majority && last == j -> ripe[m] = 2
    :: else
    fi;
    last = 0; expected = 0; quorum = 0; settled_by = 0; is_majority = 0; j = 0
}

/* The peer lets go of its connection. */
inline leave(p) {
    if
    :: at[p] != NONE -> drain(down[AT(at[p], p)])
    :: else
    fi;
    at[p] = NONE; led = led & ~BIT(p)
}

inline forget(p) {
    answered = answered & ~BIT(p); halted = halted & ~BIT(p); heard_commit = heard_commit & ~BIT(p);
    settled_commit = settled_commit & ~BIT(p);
    term[p] = 0; view[p] = 0; prepared[p] = 0; answers[p] = 0
}

inline put_out(p) {
    leave(p);
    ended = ended | BIT(p);
    forget(p)
}

inline die(p) {
    leave(p);
    alive = alive & ~BIT(p);
    forget(p)
}

#if KEEP && !defined(WITHOUT_KNOWN_TO_ENOUGH)
/* Leadership.is_known_to_enough: no majority of a quorum view is left that has not heard of it. */
inline consider(m) {
    set = 0; i = 0;
    do
    :: i < VIEWS && HAS(quorum_views[m], i) && (COUNT(peers_of[i] & ~members[m]) + COUNT(peers_of[i] & m_ready[m]) >= MAJORITY(peers_of[i])) -> set = (m_ready[m] != 0); i++
    :: i < VIEWS && !(HAS(quorum_views[m], i) && (COUNT(peers_of[i] & ~members[m]) + COUNT(peers_of[i] & m_ready[m]) >= MAJORITY(peers_of[i]))) -> i++
    :: i == VIEWS -> break
    od;
    i = 0
}
#elif KEEP || defined(WITHOUT_ANSWERS)
inline consider(m) { set = 0 }
#else
inline consider(m) { set = (m_ready[m] != 0) }
#endif

/* Master._advance: prepare and install. */
inline advance(m) {
    if
    :: m_changed[m] && m_flush[m] == 0 && m_view[m] % PER_TERM < PER_TERM - 1 ->
        if
        :: !m_decided[m] && !KEEP ->
            m_commit[m] = (m_commit[m] || (m_installed[m] == FIRST && (members[m] & ~m_holders[m]) == 0));
            m_decided[m] = 1
        :: else
        fi;
        m_changed[m] = 0; m_view[m]++;
        peers_of[m_view[m]] = members[m];
        m_preparing[m] = 1; m_ready[m] = members[m];
        tell(m, members[m], PREPARE, (m_view[m] << 1) | m_commit[m])
    :: else
    fi;
    if
    :: m_preparing[m] ->
        consider(m);
        if
        :: !set ->
install:    m_preparing[m] = 0; m_running[m] = 1;
            m_installed[m] = m_view[m]; m_ready[m] = 0;
            quorum_views[m] = BIT(m_view[m]);
            tell(m, members[m], INSTALL, m_view[m])
        :: else -> set = 0
        fi
    :: else
    fi
}

/* Leadership.lose, RunState.stop. */
#ifdef WITHOUT_DEPOSITION
#define DEPOSED(m, id) 0
#else
#define DEPOSED(m, id) (COUNT(peers_of[id] & ~members[m]) >= MAJORITY(peers_of[id]))
#endif

inline lose(m, p) {
    members[m] = members[m] & ~BIT(p);
    drain(back[AT(m, p)]);
    m_flush[m] = m_flush[m] & ~BIT(p); m_ready[m] = m_ready[m] & ~BIT(p);
    set = (members[m] == 0); i = 0;
    do
    :: i < VIEWS && HAS(quorum_views[m], i) && DEPOSED(m, i) -> set = 1; i++
    :: i < VIEWS && !(HAS(quorum_views[m], i) && DEPOSED(m, i)) -> i++
    :: i == VIEWS -> break
    od;
    i = 0;
    if
    :: set -> set = 0; vacate(m)
    :: !set ->
        m_changed[m] = 1;
        if
        :: m_running[m] ->
            m_running[m] = 0;
            if
            :: !KEEP && m_installed[m] == FIRST -> m_flush[m] = members[m]; m_holders[m] = 0; tell(m, members[m], FLUSH, 0)
            :: else
            fi
        :: else
        fi;
        advance(m)
    fi
}

/* At one that leads. */
inline intrude(m, p) {
    leave(p);
    if
    :: HAS(members[m], p) && term[p] > leads[m] -> vacate(m)
    :: HAS(members[m], p) && term[p] <= leads[m] -> lose(m, p); put_out(p)
    :: !HAS(members[m], p) -> put_out(p)
    fi
}

/* Failover._resume at a master that is vacant. */
inline come(m, p) {
    if
    :: at[p] != NONE -> leave(p)
    :: else
    fi;
    drain(down[AT(m, p)]); drain(back[AT(m, p)]);
    at[p] = m;
    forget_claim(m, p);
    here[m] = here[m] | BIT(p);
    s_view[AT(m, p)] = view[p]; s_prepared[AT(m, p)] = prepared[p];
    s_answers[AT(m, p)] = answers[p] | (HAS(answered, p) * ONE(prepared[p]));
    if
    :: asked[m] <= term[p] -> asked[m] = term[p] + 1; following[m] = 0; s_halted[m] = 0; s_commit[m] = 0
    :: else
    fi;
    recheck(m)
}

/* One that follows has gone elsewhere, and the master has not noticed. */
#define LEFT(m, p) (HAS(following[m], p) && at[p] != m)
#if N == 3
#define STALE(m) (LEFT(m, 0) || LEFT(m, 1) || LEFT(m, 2))
#else
#define STALE(m) 1
#endif

/* Failover._lead and recovery.take_over. */
inline lead(m) {
    judge(m, following[m]);
    leads[m] = asked[m];
    late = late || (alive & ~ended & ~following[m]) || STALE(m);
    assert(!HAS(led_terms, leads[m]));                     /* R2 */
    led_terms = led_terms | BIT(leads[m]);
    known[leads[m]] = quorum | (BIT(last + 1) - 1);
    assert((in_force & ~known[leads[m]] & (BIT(PER_TERM * leads[m]) - 1)) == 0); /* R3 */
    members[m] = expected; quorum_views[m] = quorum; m_installed[m] = last; m_view[m] = PER_TERM * leads[m];
    tell(m, here[m] & ~expected, GOODBYE, 0);
    tell(m, expected, RESUMED, quorum);
    /* A group that is not steady is flushed; whoever has settled needs not be. */
    i = 0; set = 0;
    do
    :: i < N ->
        is_newer = is_newer || (HAS(following[m], i) && (s_prepared[AT(m, i)] > last || s_answers[AT(m, i)] >= BIT(last + 1))) || (HAS(expected, i) && s_view[AT(m, i)] != last);
        if
        :: HAS(expected, i) && s_prepared[AT(m, i)] > last && s_view[AT(m, i)] == last -> m_decided[m] = !KEEP
        :: HAS(expected, i) && s_prepared[AT(m, i)] == 0 && s_view[AT(m, i)] == FIRST -> set = set | BIT(i)
        :: else
        fi;
        i++
    :: i == N -> break
    od;
#ifndef WITHOUT_REPORTED_COMMITS
    m_commit[m] = (last == FIRST && (s_commit[m] & expected) != 0);
#endif
    if
    :: last != FIRST -> m_decided[m] = !KEEP
    :: else
    fi;
    if
    :: expected == peers_of[last] && !m_decided[m] && (s_halted[m] & expected) == 0 && !is_newer ->
as_it_stands: m_running[m] = 1; m_commit[m] = 0
    :: else ->
in_a_new_view: m_changed[m] = 1;
        if
        :: !KEEP -> m_flush[m] = set; tell(m, set, FLUSH, 0)
        :: else
        fi
    fi;
    i = 0; set = 0;
    do
    :: i < N -> s_view[AT(m, i)] = 0; s_prepared[AT(m, i)] = 0; s_answers[AT(m, i)] = 0; i++
    :: i == N -> break
    od;
    i = 0; here[m] = 0; following[m] = 0; asked[m] = 0; ripe[m] = 0; s_halted[m] = 0; s_commit[m] = 0;
    last = 0; expected = 0; quorum = 0; settled_by = 0; is_majority = 0; is_newer = 0;
    advance(m)
}

/* To a master that knows it no more it says nothing that counts. */
inline answer(p, what, y) {
    if
    :: HAS(members[at[p]], p) -> assert(nfull(back[AT(at[p], p)])); back[AT(at[p], p)] ! what, y
    :: else
    fi
}

#define MAY_VOTE(m, p) (HAS(here[m] & ~following[m], p) && ripe[m] && asked[m] > term[p] && asked[m] <= TERMS)

/* Who is asked to follow waits for a majority that is there. */
#define WAITED_FOR(m) (members[m] | (ripe[m] -> following[m] : 0))
#define WANDERS(p) HAS(alive & ~ended & ~led, p)

proctype Peer(byte p) {
    mtype kind;
    short x;
end:
    do
    :: atomic { HAS(alive & ~ended, p) && losses < LOSSES -> losses++; die(p) }
#if !KEEP
    /* Its engine, and what it commits by itself. The epoch is FIRST. */
    :: atomic { HAS(alive & ~ended, p) && view[p] == FIRST && done == ALL && !HAS(halted | committed, p) ->
agreed: heard_commit = heard_commit | BIT(p);
        hear(p, 1) }
#endif
    /* It loses its master: the connection breaks, or the master knows it no more. */
    :: atomic { HAS(alive & ~ended & led, p) && at[p] != NONE && cuts < CUTS -> cuts++; leave(p) }
    :: atomic { HAS(alive & ~ended, p) && at[p] != NONE && !HAS(here[at[p]] | members[at[p]], p) -> leave(p) }
    /* It loses the one that it has voted for (whom it would wait for otherwise: MasterAddresses.patience_s). */
    :: atomic { WANDERS(p) && at[p] != NONE && HAS(WAITED_FOR(at[p]), p) && cuts < CUTS -> cuts++; leave(p) } /* unreached: in the short configurations */
    /* It goes to a master that leads nothing: Resume and PreVote. All come to the first one in the end. */
    :: atomic { WANDERS(p) && (at[p] == NONE || (at[p] == 1 && !HAS(WAITED_FOR(1), p))) && leads[0] == 0 -> come(0, p) }
    :: atomic { WANDERS(p) && at[p] == NONE && leads[1] == 0 -> come(1, p) }
    /* To one that leads: it is put out, or that one gives way. */
    :: atomic { WANDERS(p) && (at[p] == NONE || (at[p] == 1 && !HAS(WAITED_FOR(1), p))) && leads[0] -> intrude(0, p) }
    :: atomic { WANDERS(p) && (at[p] == NONE || (at[p] == 0 && !HAS(WAITED_FOR(0), p))) && leads[1] -> intrude(1, p) }
    /* VoteRequest and Vote. */
    :: atomic { HAS(alive & ~ended & ~led, p) && at[p] != NONE && MAY_VOTE(at[p], p) ->
vote:   term[p] = asked[at[p]];
        following[at[p]] = following[at[p]] | BIT(p);
        s_halted[at[p]] = s_halted[at[p]] | (halted & BIT(p));
        s_commit[at[p]] = s_commit[at[p]] | ((heard_commit | settled_commit) & BIT(p));
        recheck(at[p]) }
    /* Messages of the master. */
    :: atomic { HAS(alive & ~ended, p) && at[p] != NONE && nempty(down[AT(at[p], p)]) ->
        down[AT(at[p], p)] ? kind, x;
        if
        :: kind == RESUMED ->
            assert(!HAS(led, p));                          /* R4 */
            led = led | BIT(p);
#ifndef WITHOUT_RULED_OUT
            answers[p] = answers[p] & x;
            if
            :: prepared[p] && !HAS(x, prepared[p]) -> answered = answered & ~BIT(p)
            :: else
            fi
#endif
        :: kind == FLUSH ->
            assert(HAS(led, p) && view[p] == FIRST && prepared[p] == 0); /* R4: one flush of the epoch that settles */
            halted = halted | BIT(p);
            answer(p, REPLY, HAS(done, p) | (HAS(heard_commit, p) << 1))
        :: kind == PREPARE ->
            assert(HAS(led, p) && (x >> 1) > view[p] && (x >> 1) > prepared[p]); /* R4 */
            if
            :: !KEEP && view[p] == FIRST && !prepared[p] ->
                halted = halted | BIT(p);
                assert(!(x & 1) || HAS(done, p));          /* R4 */
                settled_commit = settled_commit | (BIT(p) * ((x & 1) || HAS(heard_commit, p)))
            :: else
            fi;
            if
            :: prepared[p] && HAS(answered, p) && TERM_OF(prepared[p]) != term[p] ->
                answers[p] = answers[p] | BIT(prepared[p])
            :: else
            fi;
            prepared[p] = x >> 1; answered = answered | BIT(p);
            answer(p, READY, x >> 1)
        :: kind == INSTALL ->
            assert(prepared[p] == x);                      /* R4 */
            if
            :: !KEEP && view[p] == FIRST && !HAS(committed, p) -> hear(p, HAS(settled_commit, p))
            :: else
            fi;
            put_in_force(x);
            view[p] = x; prepared[p] = 0; answered = answered & ~BIT(p); answers[p] = 0;
            heard_commit = heard_commit & ~BIT(p); settled_commit = settled_commit & ~BIT(p);
            halted = halted & ~BIT(p)
        :: kind == GOODBYE -> put_out(p)
        fi;
        kind = 0; x = 0 }
    od
}

/* What is common to all peers at a master, and what comes of one of them. */
#define FREE(m, p) (HAS(members[m], p) && (!HAS(alive, p) || at[p] != m))

proctype Master(byte m) {
end:
    do
    :: atomic { (leads[m] || here[m]) && deaths < DEATHS -> deaths++; vacate(m) }
    :: atomic { leads[m] == 0 && ripe[m] == 2 && asked[m] <= TERMS -> lead(m) }
    od
}

proctype Line(byte m, p) {
    mtype kind;
    byte x;
end:
    do
    :: atomic { HAS(here[m], p) && at[p] != m -> forget_claim(m, p); recheck(m) }
    :: atomic { FREE(m, p) -> lose(m, p) }
#if EVICTIONS
    :: atomic { HAS(members[m] & alive, p) && at[p] == m && evictions < EVICTIONS -> evictions++; lose(m, p) }
#endif
    :: atomic { HAS(members[m], p) && nempty(back[AT(m, p)]) ->
        back[AT(m, p)] ? kind, x;
        if
        :: kind == REPLY ->
            m_flush[m] = m_flush[m] & ~BIT(p);
            m_holders[m] = m_holders[m] | ((x & 1) << p);
            m_commit[m] = m_commit[m] || (x & 2);
            advance(m)
        :: kind == READY && x == m_view[m] -> m_ready[m] = m_ready[m] & ~BIT(p); advance(m)
        :: kind == READY && x != m_view[m]
        fi;
        kind = 0; x = 0 }
    od
}

#define LOST (ALL & (~alive | ended))

/* R5: when nothing more can happen. */
active proctype Rest() {
    timeout -> atomic {
        i = 0; set = 0; last = 0;
        do
        :: i < N ->
            if
            :: !HAS(LOST, i) && (!HAS(led, i) || prepared[i]) -> set = 1
            :: else
            fi;
            if
            :: !HAS(LOST, i) && term[i] == TERMS -> last = 1 /* the bound of the model is reached */
            :: else
            fi;
            i++
        :: i == N -> break
        od;
        assert(!set || last || losses + cuts + evictions + late > 1);
        i = 0; set = 0; last = 0
    }
}

init {
    atomic {
        peers_of[FIRST] = ALL; in_force = BIT(FIRST); led_terms = BIT(1); known[1] = BIT(FIRST + 1) - 1;
        leads[0] = 1; members[0] = ALL; quorum_views[0] = BIT(FIRST); m_view[0] = FIRST; m_installed[0] = FIRST; m_running[0] = 1;
        do
        :: count < N ->
            view[count] = FIRST; term[count] = 1;
            run Peer(count);
            run Line(0, count);
            run Line(1, count);
            count++
        :: count == N -> break
        od;
        count = 0;
        /* Peers are alike. An engine that is done later is one whose peer commits later, or that never is. */
        if
        :: !KEEP -> done = ALL
        :: !KEEP -> done = ALL & ~1
        :: done = 0
        fi;
        run Master(0);
        run Master(1)
    }
}
