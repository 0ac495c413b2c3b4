/*
 * Completion of an op under one master: commit by mutual completion, abort votes, flushes, views.
 *
 * MODELLED. N peers of one ring and the master that leads them, which lives. One op of all peers. Each peer has a
 * machine (pccl/protocol/peer) and an engine (native/); the engine's reports reach the machine later, in order. The
 * master's part is pccl/protocol/master/verdicts.py with the stages of a view of master/machine.py. Control
 * connections are FIFO channels. LOSSES peers are lost: each dies, or is evicted while it lives (the master hears
 * nothing of it) and goes on by itself until it hears so. CUTS links break between peers that live. GIVE_UPS callers
 * give up. STALLS: peers may say that they wait for long, and the master may then put the op to a vote by itself, as it
 * does for the sake of group calls. MESH 1: the peers end the op by themselves; 0: the master does.
 *
 * ABSTRACTED, and why nothing is lost by it.
 *   One op             ops of different tags share no state of the protocol; of one tag a peer has one in flight. What a
 *                      later use changes (rule 8 of completion.py) is that an earlier verdict need not be told.
 *   Payload            an engine may become done as soon as all have launched the op, or never once a peer it needs has
 *                      stopped, died, or lost its link ("starved"): more than real payload can do, and nothing less.
 *   DONE frames        a bit per pair, for a sender says it once; they come as long as the link stands. FIFO order with
 *                      other frames tells nothing, since nothing else is modelled of a link.
 *   Lost messages      a message is lost only with its connection, so with its peer: sessions resume (control_session).
 *   Heartbeats, time   a dead peer is missed at any time after its death, a live one evicted at any time.
 *   Refused ops        the engine refuses an op before its first byte: a give-up of a peer that is not done.
 *
 * PROPERTIES
 *   C1  No two peers hear different verdicts of the op, dead and evicted ones included.
 *   C2  Nobody commits what a survivor lacks: a commit anywhere means that the engine of every survivor was done.
 *   C3  No machine hears what cannot be (where the code raises ProtocolError or asserts).
 *   C4  All survivors that have launched the op hear its end, and the master has a view in force, whenever nothing more
 *       can happen (no deadlock).
 */

#ifndef N
#define N 3
#endif
#ifndef LOSSES
#define LOSSES 1
#endif
#ifndef CUTS
#define CUTS 0
#endif
#ifndef GIVE_UPS
#define GIVE_UPS 1
#endif
#ifndef STALLS
#define STALLS 0
#endif
#ifndef MESH
#define MESH 1
#endif

#define BIT(p) (1 << (p))
#define HAS(set, p) (((set) >> (p)) & 1)
#define ALL ((1 << N) - 1)

/* States of the op at a peer's machine, as in peer/op.py. ENDED is ENDING, HELD and ENDED there. */
mtype = { QUEUED, RUNNING, DONE, STOPPED, COMMITTED, SETTLED, ENDED };
/* Messages of peers. FAILED's argument: it may be done. VOTE's: it is committed. REPLY's: 1 done, 2 committed, 4 aborted. */
mtype = { FAILED, VOTE, SAYS_DONE, STALLED, OVER, LINK_LOST, REPLY, READY };
/* Messages of the master. PREPARE's argument: the op is committed. */
mtype = { VOTE_REQUEST, OPS_COMMIT, OP_ABORT, FLUSH, PREPARE, INSTALL, GOODBYE };

chan to_peer[N] = [6] of { mtype, byte };
chan to_master[N] = [7] of { mtype, byte };

/* Peers: machines. */
mtype op[N] = QUEUED;
byte committed;    /* peers whose callers hear, or have heard, that the op is committed */
byte aborted;      /* the same of an abort */
byte promised;     /* has_voted_abort, or a promise that was made before the launch */
byte giving_up;    /* the engine is to stop the op for a caller */
byte failed;       /* op.failure is known */
byte heard_commit; /* KnownVerdicts: a commit */
byte heard_abort;
byte early_abort;  /* aborted before the launch */
byte halted;       /* not is_running */
byte frozen;       /* the engine has stopped all ops of the epoch */
byte flushing;     /* a Flush waits for that */
byte stall_said;
byte in_view;      /* in the view after the flush */
byte up = ALL;     /* alive */
byte over;         /* the session is over: it has heard that it was evicted */

/* Peers: engines. */
byte launched;
byte done;         /* all result bytes are here */
byte starved;      /* they never will be */
byte stopped;
byte heard[N];     /* whose DONE has come */
byte done_read;    /* the machine has heard the engine's report */
byte agreed_read;
byte broken[N];    /* links */

/* The master. */
byte ring = ALL;
byte m_running = 1, m_preparing, m_flush, m_ready, m_holders, m_voters;
bool m_voting, m_decided, m_changed, m_heard_commit, m_settled, m_stalled;
byte m_known = ALL; /* peers that it has not lost */

byte losses, cuts, give_ups, stalls;
hidden byte q;

/* What an evicted peer says is lost. */
#define SAY(p, kind, x) if :: HAS(m_known, p) -> assert(nfull(to_master[p])); to_master[p] ! kind, x :: else fi
#define LIVE(p) (HAS(up & ~over, p))
#define RUNS(p) (LIVE(p) && !HAS(halted, p))
#define UNDECIDED(p) (op[p] != QUEUED && op[p] != ENDED)
#define IS_DONE(p) (op[p] == DONE || op[p] == SETTLED)
#define AGREED(p) (HAS(done, p) && ((heard[p] | BIT(p)) == ALL))
#define REPORTS_READ(p) ((!HAS(done, p) || HAS(done_read, p)) && (!AGREED(p) || HAS(agreed_read, p)))

/* The op is over at this peer: nothing that was about it counts any more. */
inline forget(p) {
    op[p] = ENDED;
    heard[p] = 0; broken[p] = 0;
    promised = promised & ~BIT(p); failed = failed & ~BIT(p); giving_up = giving_up & ~BIT(p);
    stall_said = stall_said & ~BIT(p); starved = starved & ~BIT(p);
    stopped = stopped | BIT(p); done_read = done_read | BIT(p); agreed_read = agreed_read | BIT(p)
}

inline hear_commit(p) {
    forget(p);
    committed = committed | BIT(p);
    assert(!aborted);                                      /* C1 */
    assert((m_known & up & ~done) == 0);                   /* C2 */
}

inline hear_abort(p) {
    forget(p);
    aborted = aborted | BIT(p);
    assert(!committed);                                    /* C1 */
}

/* What a peer that stops, dies or loses a link takes from those that need it. */
inline starve(p) {
    q = 0;
    do
    :: q < N && q != p && !HAS(done | starved, q) ->
        if
        :: starved = starved | BIT(q)
        :: skip
        fi;
        q++
    :: q < N && (q == p || HAS(done | starved, q)) -> q++
    :: q == N -> break
    od
}

/* What is said to the dead is lost. */
inline tell_all(kind, x) {
    q = 0;
    do
    :: q < N && HAS(ring & up, q) -> assert(nfull(to_peer[q])); to_peer[q] ! kind, x; q++
    :: q < N && !HAS(ring & up, q) -> q++
    :: q == N -> break
    od
}

/* Ops.done: the engine's report has come. */
inline machine_done(p) {
    done_read = done_read | BIT(p);
    if
    :: op[p] == COMMITTED && !HAS(halted, p) -> hear_commit(p)
    :: op[p] == COMMITTED && HAS(halted, p) -> op[p] = SETTLED
    :: op[p] == RUNNING ->
        op[p] = DONE;
        if
        :: !HAS(halted, p) && (!MESH || HAS(stall_said, p)) -> SAY(p, SAYS_DONE, 0)
        :: else
        fi
    :: else
    fi
}

/* Ops.completed. What keeps a machine from committing by itself, also when its ops are stopped: */
#if defined(WITHOUT_PROMISE)
#define BOUND(p) 0
#else
#define BOUND(p) HAS(promised, p)
#endif

inline machine_agreed(p) {
    agreed_read = agreed_read | BIT(p);
    if
    :: op[p] == DONE && !BOUND(p) ->
commit:        heard_commit = heard_commit | BIT(p);
        if
        :: HAS(stall_said, p) && !HAS(halted, p) -> SAY(p, OVER, 0)
        :: else
        fi;
        hear_commit(p)
    :: else
    fi
}

/* Ops.stopped: for one op, on behalf of a caller. */
inline machine_stopped(p) {
    giving_up = giving_up & ~BIT(p);
    if
    :: UNDECIDED(p) ->
        if
        :: op[p] == RUNNING -> op[p] = STOPPED
        :: else
        fi;
        promised = promised | BIT(p);
        if
        :: !HAS(halted, p) ->
#ifdef WITHOUT_VOTE
            SAY(p, FAILED, 0)
#else
            SAY(p, FAILED, op[p] != STOPPED)
#endif
        :: else
        fi
    :: else
    fi
}

inline flush_reply(p) {
    flushing = flushing & ~BIT(p);
    frozen = frozen | BIT(p);
#ifdef WITHOUT_FLUSH_COMMITS
    SAY(p, REPLY, (IS_DONE(p) | (HAS(heard_abort, p) << 2)))
#else
    SAY(p, REPLY, (IS_DONE(p) | (HAS(heard_commit, p) << 1) | (HAS(heard_abort, p) << 2)))
#endif
}

inline on_prepare(p, is_committed) {
    halted = halted | BIT(p);
    flushing = flushing & ~BIT(p);
    if
    :: UNDECIDED(p) && (is_committed || op[p] == COMMITTED || op[p] == SETTLED) ->
        assert(IS_DONE(p));                                /* C3 */
        hear_commit(p)
    :: UNDECIDED(p) && !is_committed && op[p] != COMMITTED && op[p] != SETTLED -> hear_abort(p)
    :: op[p] == QUEUED -> forget(p) /* it starts in the next epoch */
    :: op[p] == ENDED
    fi;
    SAY(p, READY, 0)
}

/* Peers are alike, so those that launch the op do so in the order of their numbers. */
#define IN_TURN(p) (p == 0 || op[p - 1] != QUEUED)

proctype Peer(byte p) {
    byte x;
    mtype kind;
end:
    do
    /* Callers. */
    :: atomic { RUNS(p) && op[p] == QUEUED && IN_TURN(p) ->
launch:     launched = launched | BIT(p);
            if
            :: HAS(early_abort, p) -> op[p] = ENDED; launched = launched & ~BIT(p); hear_abort(p)
            :: else -> op[p] = RUNNING
            fi }
    :: atomic { RUNS(p) && UNDECIDED(p) && !HAS(failed, p) && give_ups < GIVE_UPS ->
give_up:    give_ups++;
            failed = failed | BIT(p);
            if
            :: MESH ->
#ifdef WITHOUT_STOP
                SAY(p, FAILED, op[p] != RUNNING);
                promised = promised | BIT(p)
#else
                giving_up = giving_up | BIT(p)
#endif
            :: !MESH -> SAY(p, FAILED, 0)
            fi }
#if STALLS
    :: atomic { RUNS(p) && (op[p] == RUNNING || op[p] == DONE) && !HAS(stall_said, p) && stalls < STALLS ->
stall:      stalls++;
            stall_said = stall_said | BIT(p);
            SAY(p, STALLED, 0);
            if
            :: op[p] == DONE && MESH -> SAY(p, SAYS_DONE, 0)
            :: else
            fi }
#endif
    /* The engine. */
    :: atomic { HAS(up, p) && launched == ALL && !HAS(done | stopped | starved, p) ->
engine_done: done = done | BIT(p) }
    :: atomic { HAS(up & done, p) && !HAS(done_read, p) && !HAS(over, p) -> machine_done(p) }
    :: atomic { HAS(up & done_read, p) && MESH && AGREED(p) && !HAS(agreed_read, p) && !HAS(over, p) ->
        machine_agreed(p) }
    /* It has stopped the op for its caller. */
    :: atomic { HAS(up & giving_up, p) && !HAS(stopped, p) && !HAS(over, p) ->
engine_stop: stopped = stopped | BIT(p);
            if
            :: !HAS(done, p) -> starve(p)
            :: else
            fi }
    :: atomic { HAS(up & giving_up & stopped, p) && !HAS(over, p) && REPORTS_READ(p) -> machine_stopped(p) }
    /* It has stopped all ops for a flush. */
    :: atomic { HAS(up & flushing, p) && !HAS(stopped, p) && !HAS(over, p) -> stopped = stopped | BIT(p) }
#ifdef WITHOUT_FREEZE
    :: atomic { HAS(up & flushing, p) && !HAS(over, p) -> flush_reply(p) }
#else
    :: atomic { HAS(up & flushing & stopped, p) && !HAS(over, p) && REPORTS_READ(p) -> flush_reply(p) }
#endif
    /* Messages of the master. */
    :: atomic { LIVE(p) && nempty(to_peer[p]) ->
        to_peer[p] ? kind, x;
        if
        :: kind == VOTE_REQUEST ->
voted:      assert(!HAS(halted, p));                       /* C3 */
            if
            :: op[p] == QUEUED ->
#ifndef WITHOUT_EARLY_PROMISE
                promised = promised | BIT(p);
                failed = failed | BIT(p);
#endif
                SAY(p, VOTE, 0)
            :: UNDECIDED(p) ->
                promised = promised | BIT(p);
                failed = failed | BIT(p);
                SAY(p, VOTE, op[p] == COMMITTED)
            :: op[p] == ENDED ->
#ifdef WITHOUT_COMMITTED_VOTE
                SAY(p, VOTE, 0)
#else
                SAY(p, VOTE, !HAS(heard_abort, p))
#endif
            fi
        :: kind == OPS_COMMIT ->
            assert(!HAS(halted, p));                       /* C3 */
            if
            :: op[p] == DONE -> op[p] = ENDED; heard_commit = heard_commit | BIT(p); hear_commit(p)
            :: op[p] == RUNNING && MESH -> op[p] = COMMITTED; heard_commit = heard_commit | BIT(p)
            :: op[p] == ENDED -> assert(HAS(committed, p)) /* C1 */
            :: else -> assert(op[p] == COMMITTED)          /* C3; unreached: it is told once */
            fi
        :: kind == OP_ABORT ->
            assert(!HAS(halted, p));                       /* C3 */
            promised = promised & ~BIT(p);
            if
            :: UNDECIDED(p) ->
                heard_abort = heard_abort | BIT(p);
                hear_abort(p)
            :: op[p] == QUEUED -> heard_abort = heard_abort | BIT(p); early_abort = early_abort | BIT(p)
            :: op[p] == ENDED -> assert(!HAS(committed, p)) /* C1; unreached: only who commits ends an op before */
            fi
        :: kind == FLUSH ->
            assert(!HAS(halted, p));                       /* C3 */
            halted = halted | BIT(p);
            flushing = flushing | BIT(p)
        :: kind == PREPARE -> on_prepare(p, x)
        :: kind == INSTALL -> in_view = in_view | BIT(p)
        :: kind == GOODBYE -> over = over | BIT(p); forget(p)
        fi;
        kind = 0; x = 0 }
    od
}

/* OpVerdicts._commit and abort. */
inline commit_op() {
    m_voting = false; m_voters = 0;
    m_decided = true;
    tell_all(OPS_COMMIT, 0)
}

inline abort_op() {
    m_voting = false; m_voters = 0;
    m_decided = true; m_holders = 0;
    tell_all(OP_ABORT, 0)
}

inline note_vote(p) {
    m_voters = m_voters & ~BIT(p);
    if
    :: m_voters == 0 -> abort_op()
    :: else
    fi
}

/* OpVerdicts.call_vote. */
inline call_vote(by) {
    m_voting = true; m_voters = ring & ~(by);
    q = 0;
    do
    :: q < N && HAS(m_voters & up, q) -> assert(nfull(to_peer[q])); to_peer[q] ! VOTE_REQUEST, 0; q++
    :: q < N && !HAS(m_voters & up, q) -> q++
    :: q == N -> break
    od
}

/* RunState.stop: the flush of the group. */
inline stop_group() {
    m_changed = true;
    if
    :: m_running -> m_running = 0; m_voters = 0; m_flush = ring; tell_all(FLUSH, 0)
    :: else
    fi
}

inline m_done(p) {
    if
    :: !m_decided ->
        m_holders = m_holders | BIT(p);
        if
        :: m_holders == ALL && m_running -> commit_op()
        :: m_holders == ALL && !m_running -> m_decided = true; m_heard_commit = true; m_holders = 0
        :: else
        fi
    :: else
    fi
}

/* Every step that has become possible: finish_flushes, _prepare, _install. */
inline advance() {
    if
    :: !m_running && m_changed && m_flush == 0 && ring ->
        if
        :: !m_settled ->
settle:     m_settled = true;
            /* What was heard to be committed counts, and what all survivors are done with. */
#ifdef WITHOUT_ALL_SURVIVORS
            m_heard_commit = (m_heard_commit || (m_holders & ring));
#else
            m_heard_commit = (m_heard_commit || (ring & ~m_holders) == 0);
#endif
            m_voting = false; m_holders = 0
        :: else
        fi;
        m_changed = false; m_preparing = 1; m_ready = ring;
        tell_all(PREPARE, m_heard_commit)
    :: else
    fi;
    if
    :: m_preparing && !m_changed && m_ready == 0 && ring -> m_preparing = 0; tell_all(INSTALL, 0)
    :: else
    fi
}

inline die(p) {
    up = up & ~BIT(p);
    forget(p);
    halted = halted & ~BIT(p); flushing = flushing & ~BIT(p); frozen = frozen & ~BIT(p); in_view = in_view & ~BIT(p);
    heard_commit = heard_commit & ~BIT(p); heard_abort = heard_abort & ~BIT(p); early_abort = early_abort & ~BIT(p);
    do
    :: nempty(to_peer[p]) -> to_peer[p] ? _, _
    :: empty(to_peer[p]) -> break
    od
}

inline lose(p) {
    do
    :: nempty(to_master[p]) -> to_master[p] ? _, _
    :: empty(to_master[p]) -> break
    od;
    m_known = m_known & ~BIT(p);
    ring = ring & ~BIT(p);
    m_flush = m_flush & ~BIT(p);
    m_ready = m_ready & ~BIT(p);
    stop_group();
    advance()
}

/* What it hears of one peer, and what happens to that. */
proctype Master(byte p) {
    byte x;
    mtype kind;
end:
    do
    :: atomic { HAS(ring, p) && nempty(to_master[p]) ->
        to_master[p] ? kind, x;
        if
        :: kind == FAILED ->
            if
            :: m_running && !m_decided && !x -> abort_op()
            :: m_running && !m_decided && x && m_voting -> note_vote(p)
            :: m_running && !m_decided && x && !m_voting -> call_vote(BIT(p))
            :: else
            fi
        :: kind == VOTE ->
            if
            :: m_running && m_voting && !x -> note_vote(p)
            :: m_running && m_voting && x && !m_decided -> m_holders = 0; commit_op()
            :: else
            fi
        :: kind == SAYS_DONE -> m_done(p)
#if STALLS
        :: kind == STALLED -> m_stalled = !m_decided
        :: kind == OVER -> m_holders = m_holders & ~BIT(p); m_stalled = false
#endif
#if CUTS
        :: kind == LINK_LOST -> stop_group(); advance()
#endif
        :: kind == REPLY ->
            m_flush = m_flush & ~BIT(p);
            if
            :: x & 2 -> m_heard_commit = true
            :: else
            fi;
            if
            :: (x & 1) && !m_decided -> m_holders = m_holders | BIT(p)
            :: else
            fi;
            advance()
        :: kind == READY -> m_ready = m_ready & ~BIT(p); advance()
        fi;
        kind = 0; x = 0 }
#if STALLS
    /* For the sake of group calls: see completion.py, 6. */
    :: atomic { p == 0 && m_stalled && m_running && !m_decided && !m_voting -> m_stalled = false; call_vote(0) }
#endif
    /* It dies, and is missed later; or it lives and is evicted. */
    :: atomic { HAS(m_known & up, p) && losses < LOSSES ->
        losses++;
        starve(p);
        if
        :: die(p)
        :: to_peer[p] ! GOODBYE, 0; lose(p)
        fi }
    :: atomic { HAS(m_known & ~up, p) -> lose(p) }
    od
}

/* A link between two peers: DONE frames come, or never will. */
#define LINK(a, b) (!HAS(broken[a], b) && !HAS(heard[a], b))
/* What has come of it before the receiver is done counts when it is: a link may break late. */
#define COUNTS(a) (HAS(done, a) || CUTS)

proctype Link(byte a, b) {
end:
    do
    :: atomic { HAS(up, a) && LINK(a, b) && HAS(done, b) && UNDECIDED(a) && COUNTS(a) -> heard[a] = heard[a] | BIT(b) }
    /* With its peer's death a link breaks, and what was on its way is lost. */
    :: atomic { HAS(up, a) && LINK(a, b) && !HAS(up, b) && UNDECIDED(a) -> broken[a] = broken[a] | BIT(b) }
#if CUTS
    :: atomic { a < b && HAS(up, a) && HAS(up, b) && cuts < CUTS ->
        cuts++;
        broken[a] = broken[a] | BIT(b); broken[b] = broken[b] | BIT(a);
        starve(a); starve(b);
        if
        :: RUNS(a) -> SAY(a, LINK_LOST, 0)
        :: else
        fi;
        if
        :: RUNS(b) -> SAY(b, LINK_LOST, 0)
        :: else
        fi }
#endif
    od
}

init {
    byte a, b;
    atomic {
        do
        :: a < N ->
            run Peer(a);
            run Master(a);
            b = 0;
            do
            :: b < N && a != b && MESH -> run Link(a, b); b++
            :: b < N && (a == b || !MESH) -> b++
            :: b == N -> break
            od;
            a++
        :: a == N -> break
        od;
        a = 0; b = 0
    }
}

/* C4: when nothing more can happen. */
active proctype Rest() {
    timeout -> atomic {
        assert(!m_preparing && !m_changed && m_flush == 0);
        q = 0;
        do
        :: q < N && HAS(ring & up, q) ->
            assert(op[q] == ENDED);
            assert(m_running || HAS(in_view, q));
            q++
        :: q < N && !HAS(ring & up, q) -> q++
        :: q == N -> break
        od;
        assert((committed & ring & up) == 0 || (aborted & ring & up) == 0)
    }
}
