/* beacon.c: signs of life.
 *
 * A process that is killed has its connections closed by its system, and is found at once. One that is stopped,
 * whose machine lost its power, or whose cable was pulled says nothing at all, and nothing that TCP offers finds it
 * in seconds: a stopped process's system goes on acknowledging, and keepalive probes get their answers from it too.
 * So each side sends a byte (a "beat") every so often and expects the other's.
 *
 * All of it happens in one thread that runs none of its user's code: a process that computes for a minute without
 * letting anybody else in (Python's global lock) goes on beating, as does one whose other connections are full.
 *
 * The thread wakes four times per beat, and at once when a connection is closed: a process that dies is to be found by
 * this connection as soon as by its others. At each turn it reads what has come on every connection, sends a beat if one
 * is due, and then looks who has not been heard for the timeout. What has come counts as heard now, however long it
 * lay there, so a thread that is late by a little blames nobody. One that is late by a lot (the process was stopped,
 * the machine suspended) cannot know what the others did meanwhile, and starts their time anew.
 *
 * Sends never wait and their errors are ignored: whatever hinders a beat either closes the connection, which reading
 * finds, or keeps the other side from hearing us, which is for the other side to find. TCP itself must not add to the
 * silence: after a short outage it would sit out a retransmission timer that has doubled several times over.
 * TCP_THIN_LINEAR_TIMEOUTS keeps that timer short, for connections with few packets on their way. Nagle's algorithm
 * sees to that: there is one at a time.
 *
 * What beats say is that somebody is there to be talked to, so they may vouch for the loop that does the talking
 * (pccl_beacon_vouch): who stands still for too long is not heard any more, and is found like one that was stopped. A
 * loop in an interpreter may stand still for two reasons. Somebody else lets nobody in: that passes, and is tolerated
 * for long (hold_ms). Or the loop itself is stuck, in a write to a full pipe, say, and does not come back: then other
 * threads do get in, of which one has looked LOOKS_MIN times since, and much less is tolerated (still_ms).
 *
 * A connection has at most one event, its last: its memory is the event's, so telling cannot fail. */
#include "pccl_native.h"

#include "base.h"
#include "fd_registry.h"
#include "list.h"
#include "thread.h"
#include "wake.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* SO_NOSIGPIPE does it */
#endif
#ifndef POLLRDHUP
#define POLLRDHUP 0 /* POLLHUP does it, or the next turn */
#endif

enum {
    BEAT = 'b',
    BEAT_INTERVAL_MS_MAX = 1000,
    BEATS_PER_TIMEOUT = 5,
    TURNS_PER_BEAT = 4,
    LOOKS_MIN = 5,
    READS_PER_TURN_MAX = 4, /* of a connection that floods us */
    READ_BYTES = 256
};

typedef struct {
    pccl_list in_list; /* `connections`, then `told` */
    int fd;
    int64_t heard_ms;
    pccl_beacon_event event; /* `connection` from the start */
} beat_connection;

struct pccl_beacon {
    pthread_t thread;
    pccl_wake stop;
    pccl_wake news;
    pccl_fd_registry *fds;
    int64_t timeout_ms;
    int64_t interval_ms;
    int64_t turned_ms;
    int64_t beat_due_ms;
    struct pollfd *watched; /* `stop`, then the connections of the last turn in their order */
    uint64_t *watched_names; /* their numbers */
    size_t room; /* of both arrays */

    pthread_mutex_t mutex; /* for what follows; nobody waits while holding it */
    pccl_list connections;
    pccl_list told;
    const pccl_progress *progress; /* NULL: beats vouch for nothing */
    int64_t hold_ms;
    int64_t still_ms;
    uint64_t turns;
    uint64_t looks; /* when `turns` changed last, at progressed_ms */
    int64_t progressed_ms;
};

static beat_connection *connection_of(pccl_list *node)
{
    return PCCL_CONTAINER_OF(node, beat_connection, in_list);
}

/* The thread */

static void beacon_tell(pccl_beacon *beacon, beat_connection *found, uint32_t kind, int system_error)
{
    pccl_fd_registry_close(beacon->fds, found->fd);
    found->event.kind = kind;
    found->event.silent_ms = (uint32_t)(beacon->turned_ms - found->heard_ms);
    found->event.system_error = system_error;
    pccl_list_remove(&found->in_list);
    if (pccl_list_is_empty(&beacon->told))
        pccl_wake_signal(&beacon->news);
    pccl_list_append(&beacon->told, &found->in_list);
}

/* 1 while the connection is open. */
static int beacon_hear(pccl_beacon *beacon, beat_connection *from)
{
    uint8_t bytes[READ_BYTES];
    for (int reads = 0; reads < READS_PER_TURN_MAX; reads++) {
        ssize_t n = recv(from->fd, bytes, sizeof bytes, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 1;
        if (n <= 0) {
            beacon_tell(beacon, from, PCCL_BEACON_CLOSED, n < 0 ? errno : 0);
            return 0;
        }
        for (ssize_t i = 0; i < n; i++)
            if (bytes[i] != BEAT) {
                beacon_tell(beacon, from, PCCL_BEACON_CLOSED, EPROTO);
                return 0;
            }
        from->heard_ms = beacon->turned_ms;
    }
    return 1;
}

static void beacon_beat(const beat_connection *to)
{
    uint8_t beat = BEAT;
    ssize_t n;
    do
        n = send(to->fd, &beat, sizeof beat, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
}

static void beacon_note_progress(pccl_beacon *beacon, int64_t now_ms)
{
    beacon->turns = __atomic_load_n(&beacon->progress->turns, __ATOMIC_RELAXED);
    beacon->looks = __atomic_load_n(&beacon->progress->looks, __ATOMIC_RELAXED);
    beacon->progressed_ms = now_ms;
}

/* Whether there is anything to vouch for. */
static int beacon_goes_on(pccl_beacon *beacon, int64_t now_ms, int was_away)
{
    if (beacon->progress == NULL)
        return 1;
    if (was_away || __atomic_load_n(&beacon->progress->turns, __ATOMIC_RELAXED) != beacon->turns)
        beacon_note_progress(beacon, now_ms);
    int64_t still_ms = now_ms - beacon->progressed_ms;
    uint64_t looks = __atomic_load_n(&beacon->progress->looks, __ATOMIC_RELAXED) - beacon->looks;
    int is_stuck = beacon->still_ms > 0 && still_ms >= beacon->still_ms && looks >= LOOKS_MIN;
    return !is_stuck && still_ms < beacon->hold_ms;
}

static void beacon_turn(pccl_beacon *beacon, int64_t now_ms)
{
    int was_away = now_ms - beacon->turned_ms > beacon->timeout_ms / 2;
    int is_beat_due = now_ms >= beacon->beat_due_ms;
    int goes_on = beacon_goes_on(beacon, now_ms, was_away);
    beacon->turned_ms = now_ms;
    if (is_beat_due)
        beacon->beat_due_ms = now_ms + beacon->interval_ms;
    pccl_list *next;
    for (pccl_list *node = beacon->connections.next; node != &beacon->connections; node = next) {
        next = node->next;
        beat_connection *each = connection_of(node);
        if (was_away)
            each->heard_ms = now_ms;
        if (!beacon_hear(beacon, each))
            continue;
        if (is_beat_due && goes_on)
            beacon_beat(each);
        if (now_ms - each->heard_ms >= beacon->timeout_ms)
            beacon_tell(beacon, each, PCCL_BEACON_SILENT, 0);
    }
}

/* 0 if there is no memory. */
static int beacon_make_room(pccl_beacon *beacon, size_t count)
{
    if (count <= beacon->room)
        return 1;
    size_t room = 2 * count;
    struct pollfd *watched = realloc(beacon->watched, room * sizeof *watched);
    if (watched != NULL)
        beacon->watched = watched;
    uint64_t *names = realloc(beacon->watched_names, room * sizeof *names);
    if (names != NULL)
        beacon->watched_names = names;
    if (watched == NULL || names == NULL)
        return 0;
    beacon->room = room;
    return 1;
}

/* What to poll until the next turn; connections that there is no memory for are only looked at in turns. */
static nfds_t beacon_watch(pccl_beacon *beacon)
{
    nfds_t count = 1;
    for (pccl_list *node = beacon->connections.next; node != &beacon->connections; node = node->next) {
        if (!beacon_make_room(beacon, (size_t)count + 1))
            break;
        const beat_connection *each = connection_of(node);
        beacon->watched[count] = (struct pollfd){.fd = each->fd, .events = POLLRDHUP, .revents = 0};
        beacon->watched_names[count++] = each->event.connection;
    }
    return count;
}

/* Reads from those that `poll` has found closed. Of the `count` watched ones some may have been removed since. */
static void beacon_hear_closed(pccl_beacon *beacon, nfds_t count)
{
    nfds_t at = 1;
    pccl_list *next;
    for (pccl_list *node = beacon->connections.next; node != &beacon->connections && at < count; node = next) {
        next = node->next;
        beat_connection *each = connection_of(node);
        while (at < count && beacon->watched_names[at] != each->event.connection)
            at++;
        if (at < count && beacon->watched[at].revents != 0)
            (void)beacon_hear(beacon, each);
    }
}

static void *beacon_main(void *argument)
{
    pccl_beacon *beacon = argument;
    int64_t turn_ms = beacon->interval_ms / TURNS_PER_BEAT;
    int64_t turn_due_ms = beacon->turned_ms + (turn_ms > 0 ? turn_ms : 1);
    nfds_t count = 1;
    for (;;) {
        int64_t left_ms = turn_due_ms - pccl_now_ms();
        int found = poll(beacon->watched, count, left_ms > 0 ? (int)left_ms : 0);
        if (found > 0 && beacon->watched[0].revents != 0)
            return NULL;
        int64_t now_ms = pccl_now_ms();
        pthread_mutex_lock(&beacon->mutex);
        if (found > 0)
            beacon_hear_closed(beacon, count);
        if (now_ms >= turn_due_ms) {
            beacon_turn(beacon, now_ms);
            turn_due_ms = now_ms + (turn_ms > 0 ? turn_ms : 1);
        }
        count = beacon_watch(beacon);
        pthread_mutex_unlock(&beacon->mutex);
    }
}

/* The callers */

static void beacon_free_all(pccl_beacon *beacon, pccl_list *list)
{
    while (!pccl_list_is_empty(list)) {
        beat_connection *first = connection_of(list->next);
        if (first->event.kind == 0)
            pccl_fd_registry_close(beacon->fds, first->fd);
        pccl_list_remove(&first->in_list);
        free(first);
    }
}

static void beacon_free(pccl_beacon *beacon)
{
    beacon_free_all(beacon, &beacon->connections);
    beacon_free_all(beacon, &beacon->told);
    pccl_wake_close(&beacon->stop);
    pccl_wake_close(&beacon->news);
    pccl_fd_registry_destroy(beacon->fds);
    pthread_mutex_destroy(&beacon->mutex);
    free(beacon->watched);
    free(beacon->watched_names);
    free(beacon);
}

static pccl_beacon *beacon_create_failed(
    pccl_beacon *beacon, const char *what, int system_error, char *error, size_t error_bytes)
{
    pccl_say_system_error(error, error_bytes, what, system_error);
    if (beacon != NULL)
        beacon_free(beacon);
    return NULL;
}

pccl_beacon *pccl_beacon_create(uint32_t timeout_ms, char *error, size_t error_bytes)
{
    if (timeout_ms == 0)
        return beacon_create_failed(NULL, "a timeout of 0 ms", EINVAL, error, error_bytes);
    pccl_beacon *beacon = calloc(1, sizeof *beacon);
    if (beacon == NULL)
        return beacon_create_failed(NULL, "beacon", ENOMEM, error, error_bytes);
    int rc = pthread_mutex_init(&beacon->mutex, NULL);
    if (rc != 0) {
        free(beacon);
        return beacon_create_failed(NULL, "pthread_mutex_init", rc, error, error_bytes);
    }
    pccl_list_init(&beacon->connections);
    pccl_list_init(&beacon->told);
    beacon->stop.read_fd = beacon->stop.write_fd = beacon->news.read_fd = beacon->news.write_fd = -1;
    beacon->timeout_ms = timeout_ms;
    beacon->interval_ms = timeout_ms / BEATS_PER_TIMEOUT;
    if (beacon->interval_ms > BEAT_INTERVAL_MS_MAX)
        beacon->interval_ms = BEAT_INTERVAL_MS_MAX;
    beacon->turned_ms = pccl_now_ms();
    beacon->fds = pccl_fd_registry_create();
    if (beacon->fds == NULL)
        return beacon_create_failed(beacon, "beacon", ENOMEM, error, error_bytes);
    if (!beacon_make_room(beacon, 1))
        return beacon_create_failed(beacon, "beacon", ENOMEM, error, error_bytes);
    if (pccl_wake_open(&beacon->stop) != 0 || pccl_wake_open(&beacon->news) != 0)
        return beacon_create_failed(beacon, "eventfd or pipe", errno, error, error_bytes);
    beacon->watched[0] = (struct pollfd){.fd = beacon->stop.read_fd, .events = POLLIN, .revents = 0};
    rc = pccl_thread_start(&beacon->thread, "pccl-beacon", beacon_main, beacon);
    if (rc != 0)
        return beacon_create_failed(beacon, "pthread_create", rc, error, error_bytes);
    return beacon;
}

void pccl_beacon_destroy(pccl_beacon *beacon)
{
    if (beacon == NULL)
        return;
    pccl_wake_signal(&beacon->stop);
    pthread_join(beacon->thread, NULL);
    beacon_free(beacon);
}

void pccl_beacon_forget_after_fork(pccl_beacon *beacon)
{
    pccl_fd_registry_forget(beacon->fds);
    pccl_wake_close(&beacon->stop);
    pccl_wake_close(&beacon->news);
}

int pccl_beacon_event_fd(const pccl_beacon *beacon) { return beacon->news.read_fd; }

int pccl_beacon_poll_events(pccl_beacon *beacon, pccl_beacon_event *events, int events_max)
{
    int count = 0;
    pthread_mutex_lock(&beacon->mutex);
    int had_some = !pccl_list_is_empty(&beacon->told);
    for (; count < events_max && !pccl_list_is_empty(&beacon->told); count++) {
        beat_connection *first = connection_of(beacon->told.next);
        events[count] = first->event;
        pccl_list_remove(&first->in_list);
        free(first);
    }
    if (had_some && pccl_list_is_empty(&beacon->told))
        pccl_wake_clear(&beacon->news);
    pthread_mutex_unlock(&beacon->mutex);
    return count;
}

static int beacon_list_quiet(
    const beat_connection *each, int64_t since_ms, uint64_t *connections, int count, int connections_max)
{
    if (each->heard_ms > since_ms || count >= connections_max)
        return count;
    connections[count] = each->event.connection;
    return count + 1;
}

int pccl_beacon_quiet(pccl_beacon *beacon, uint32_t quiet_ms, uint64_t *connections, int connections_max)
{
    int count = 0;
    pthread_mutex_lock(&beacon->mutex);
    int64_t since_ms = beacon->turned_ms - quiet_ms;
    pccl_list *node;
    for (node = beacon->connections.next; node != &beacon->connections; node = node->next)
        count = beacon_list_quiet(connection_of(node), since_ms, connections, count, connections_max);
    for (node = beacon->told.next; node != &beacon->told; node = node->next)
        count = beacon_list_quiet(connection_of(node), since_ms, connections, count, connections_max);
    pthread_mutex_unlock(&beacon->mutex);
    return count;
}

static int beacon_prepare_socket(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
        return -1;
    int off = 0;
    int on = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &off, sizeof off); /* these fail on what is not TCP */
#ifdef TCP_THIN_LINEAR_TIMEOUTS
    (void)setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &on, sizeof on);
#endif
#ifdef SO_NOSIGPIPE
    (void)setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
    (void)on;
    return 0;
}

int pccl_beacon_add(pccl_beacon *beacon, uint64_t connection, int fd)
{
    if (fd < 0)
        return PCCL_E_INVALID;
    if (pccl_fd_registry_add(beacon->fds, fd) != 0) {
        close(fd);
        return PCCL_E_INVALID;
    }
    int status = PCCL_E_SYSTEM;
    beat_connection *added = NULL;
    if (beacon_prepare_socket(fd) == 0) {
        status = PCCL_E_MEMORY;
        added = calloc(1, sizeof *added);
    }
    if (added == NULL) {
        pccl_fd_registry_close(beacon->fds, fd);
        return status;
    }
    added->fd = fd;
    added->event.connection = connection;
    pccl_list_init(&added->in_list);
    added->heard_ms = pccl_now_ms();
    beacon_beat(added); /* the other side need not wait for our next turn */
    pthread_mutex_lock(&beacon->mutex);
    pccl_list_append(&beacon->connections, &added->in_list);
    pthread_mutex_unlock(&beacon->mutex);
    return 0;
}

void pccl_progress_turn(pccl_progress *progress) { __atomic_fetch_add(&progress->turns, 1, __ATOMIC_RELAXED); }
void pccl_progress_look(pccl_progress *progress) { __atomic_fetch_add(&progress->looks, 1, __ATOMIC_RELAXED); }

void pccl_beacon_vouch(pccl_beacon *beacon, const pccl_progress *progress, uint32_t hold_ms, uint32_t still_ms)
{
    pthread_mutex_lock(&beacon->mutex);
    beacon->progress = progress;
    beacon->hold_ms = hold_ms;
    beacon->still_ms = still_ms;
    beacon_note_progress(beacon, pccl_now_ms());
    pthread_mutex_unlock(&beacon->mutex);
}

static beat_connection *beacon_find(pccl_list *list, uint64_t connection)
{
    for (pccl_list *node = list->next; node != list; node = node->next)
        if (connection_of(node)->event.connection == connection)
            return connection_of(node);
    return NULL;
}

void pccl_beacon_remove(pccl_beacon *beacon, uint64_t connection)
{
    pthread_mutex_lock(&beacon->mutex);
    beat_connection *found = beacon_find(&beacon->connections, connection);
    if (found != NULL) {
        pccl_fd_registry_close(beacon->fds, found->fd);
    } else {
        found = beacon_find(&beacon->told, connection);
    }
    if (found != NULL) {
        int was_told = found->event.kind != 0;
        pccl_list_remove(&found->in_list);
        if (was_told && pccl_list_is_empty(&beacon->told))
            pccl_wake_clear(&beacon->news);
    }
    pthread_mutex_unlock(&beacon->mutex);
    free(found);
}
