/* heartbeat.c: a failure detector with one timeout: it sends heartbeats, and reports peers that have fallen silent.
 *
 * A process that is killed has its connections closed by its system, and is found at once. One that is stopped,
 * whose machine lost its power, or whose cable was pulled says nothing at all, and nothing that TCP offers finds it
 * in seconds: a stopped process's system goes on acknowledging, and keepalive probes get their answers from it too.
 * So each side sends a byte every so often and expects the other's.
 *
 * All of it happens in one thread that runs none of its user's code: a process that computes for a minute without
 * releasing a lock (Python's global lock) goes on beating, as does one whose other connections are full.
 *
 * The thread wakes four times per heartbeat, and at once when a connection is closed: a process that dies is to be
 * found by this connection as soon as by its others. At each turn it reads what has come on every connection, sends a
 * heartbeat if one is due, and then looks which peers have been silent for the timeout. What has come counts as heard
 * now, however long it lay there, so a thread that is late by a little reports no peer. One that is late by a lot (the
 * process was stopped, the machine suspended) cannot know what the others did, and restarts their time.
 *
 * Sends never wait and their errors are ignored: whatever hinders a heartbeat either closes the connection, which
 * reading finds, or keeps the other side from hearing us, which is for the other side to find. TCP itself must not add
 * to the silence: after a short outage it would sit out a retransmission timer that has doubled several times over.
 * TCP_THIN_LINEAR_TIMEOUTS keeps that timer short, for connections with few packets on their way. Nagle's algorithm
 * sees to that: there is one at a time.
 *
 * Heartbeats say that a process can be talked to, so they may vouch for the loop that does the talking
 * (pccl_heartbeat_vouch): a process whose loop stands still for too long is not heard any more, and is found like one
 * that was stopped.
 * A loop in an interpreter may stand still for two reasons. Another thread holds the lock: that passes, and is
 * tolerated for long (hold_ms). Or the loop itself is stuck, in a write to a full pipe, say, and does not come back:
 * then other threads do get in, of which one has looked LOOKS_MIN times since, and much less is tolerated (still_ms).
 *
 * A connection has at most one event, its last: its memory is the event's, so telling cannot fail. */
#include "pccl_native.h"

#include "base.h"
#include "fd_registry.h"
#include "list.h"
#include "os.h"

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
    HEARTBEAT = 'b',
    HEARTBEAT_INTERVAL_MS_MAX = 1000,
    HEARTBEATS_PER_TIMEOUT = 5,
    TURNS_PER_HEARTBEAT = 4,
    LOOKS_MIN = 5,
    READS_PER_TURN_MAX = 4, /* of a connection that floods us */
    READ_BYTES = 256
};

typedef struct {
    pccl_list in_list; /* `connections`, then `reported` */
    int fd;
    int64_t heard_ms;
    pccl_heartbeat_event event; /* `connection` from the start */
} heartbeat_connection;

struct pccl_heartbeat {
    pthread_t thread;
    pccl_wake stop;
    pccl_wake news;
    pccl_fd_registry *fds;
    int64_t timeout_ms;
    int64_t interval_ms;
    int64_t turned_ms;
    int64_t heartbeat_due_ms;
    struct pollfd *watched; /* `stop`, then the connections of the last turn in their order */
    uint64_t *watched_names; /* their numbers */
    size_t room; /* of both arrays */

    pthread_mutex_t mutex; /* for what follows; held without waiting */
    pccl_list connections;
    pccl_list reported;
    const pccl_progress *progress; /* NULL: heartbeats vouch for nothing */
    int64_t hold_ms;
    int64_t still_ms;
    uint64_t turns;
    uint64_t looks; /* when `turns` changed last, at progressed_ms */
    int64_t progressed_ms;
};

static heartbeat_connection *connection_of(pccl_list *node)
{
    return PCCL_CONTAINER_OF(node, heartbeat_connection, in_list);
}

/* The thread */

static void heartbeat_report(pccl_heartbeat *heartbeat, heartbeat_connection *found, uint32_t kind, int system_error)
{
    pccl_fd_registry_close(heartbeat->fds, found->fd);
    found->event.kind = kind;
    found->event.silent_ms = (uint32_t)(heartbeat->turned_ms - found->heard_ms);
    found->event.system_error = system_error;
    pccl_list_remove(&found->in_list);
    if (pccl_list_is_empty(&heartbeat->reported))
        pccl_wake_signal(&heartbeat->news);
    pccl_list_append(&heartbeat->reported, &found->in_list);
}

/* Reads what has come. Nonzero while the connection is open. */
static int heartbeat_hear(pccl_heartbeat *heartbeat, heartbeat_connection *from)
{
    uint8_t bytes[READ_BYTES];
    for (int reads = 0; reads < READS_PER_TURN_MAX; reads++) {
        ssize_t n = recv(from->fd, bytes, sizeof bytes, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 1;
        if (n <= 0) {
            heartbeat_report(heartbeat, from, PCCL_HEARTBEAT_CLOSED, n < 0 ? errno : 0);
            return 0;
        }
        for (ssize_t i = 0; i < n; i++)
            if (bytes[i] != HEARTBEAT) {
                heartbeat_report(heartbeat, from, PCCL_HEARTBEAT_CLOSED, EPROTO);
                return 0;
            }
        from->heard_ms = heartbeat->turned_ms;
    }
    return 1;
}

static void heartbeat_send(const heartbeat_connection *to)
{
    uint8_t heartbeat = HEARTBEAT;
    ssize_t n;
    do
        n = send(to->fd, &heartbeat, sizeof heartbeat, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
}

static void heartbeat_note_progress(pccl_heartbeat *heartbeat, int64_t now_ms)
{
    heartbeat->turns = __atomic_load_n(&heartbeat->progress->turns, __ATOMIC_RELAXED);
    heartbeat->looks = __atomic_load_n(&heartbeat->progress->looks, __ATOMIC_RELAXED);
    heartbeat->progressed_ms = now_ms;
}

/* Nonzero if there is a loop to vouch for. */
static int heartbeat_goes_on(pccl_heartbeat *heartbeat, int64_t now_ms, int was_away)
{
    if (heartbeat->progress == NULL)
        return 1;
    if (was_away || __atomic_load_n(&heartbeat->progress->turns, __ATOMIC_RELAXED) != heartbeat->turns)
        heartbeat_note_progress(heartbeat, now_ms);
    int64_t still_ms = now_ms - heartbeat->progressed_ms;
    uint64_t looks = __atomic_load_n(&heartbeat->progress->looks, __ATOMIC_RELAXED) - heartbeat->looks;
    int is_stuck = heartbeat->still_ms > 0 && still_ms >= heartbeat->still_ms && looks >= LOOKS_MIN;
    return !is_stuck && still_ms < heartbeat->hold_ms;
}

static void heartbeat_turn(pccl_heartbeat *heartbeat, int64_t now_ms)
{
    int was_away = now_ms - heartbeat->turned_ms > heartbeat->timeout_ms / 2;
    int is_heartbeat_due = now_ms >= heartbeat->heartbeat_due_ms;
    int goes_on = heartbeat_goes_on(heartbeat, now_ms, was_away);
    heartbeat->turned_ms = now_ms;
    if (is_heartbeat_due)
        heartbeat->heartbeat_due_ms = now_ms + heartbeat->interval_ms;
    pccl_list *next;
    for (pccl_list *node = heartbeat->connections.next; node != &heartbeat->connections; node = next) {
        next = node->next;
        heartbeat_connection *each = connection_of(node);
        if (was_away)
            each->heard_ms = now_ms;
        if (!heartbeat_hear(heartbeat, each))
            continue;
        if (is_heartbeat_due && goes_on)
            heartbeat_send(each);
        if (now_ms - each->heard_ms >= heartbeat->timeout_ms)
            heartbeat_report(heartbeat, each, PCCL_HEARTBEAT_SILENT, 0);
    }
}

/* 0 if there is no memory. */
static int heartbeat_make_room(pccl_heartbeat *heartbeat, size_t count)
{
    if (count <= heartbeat->room)
        return 1;
    size_t room = 2 * count;
    struct pollfd *watched = realloc(heartbeat->watched, room * sizeof *watched);
    if (watched != NULL)
        heartbeat->watched = watched;
    uint64_t *names = realloc(heartbeat->watched_names, room * sizeof *names);
    if (names != NULL)
        heartbeat->watched_names = names;
    if (watched == NULL || names == NULL)
        return 0;
    heartbeat->room = room;
    return 1;
}

/* Makes the list of descriptors to poll until the next turn. Connections for which there is no memory in it are only
 * looked at in turns. */
static nfds_t heartbeat_watch(pccl_heartbeat *heartbeat)
{
    nfds_t count = 1;
    for (pccl_list *node = heartbeat->connections.next; node != &heartbeat->connections; node = node->next) {
        if (!heartbeat_make_room(heartbeat, (size_t)count + 1))
            break;
        const heartbeat_connection *each = connection_of(node);
        heartbeat->watched[count] = (struct pollfd){.fd = each->fd, .events = POLLRDHUP, .revents = 0};
        heartbeat->watched_names[count++] = each->event.connection;
    }
    return count;
}

/* Reads from those that `poll` has found closed. Of the `count` watched ones some may have been removed since. */
static void heartbeat_hear_closed(pccl_heartbeat *heartbeat, nfds_t count)
{
    nfds_t at = 1;
    pccl_list *next;
    for (pccl_list *node = heartbeat->connections.next; node != &heartbeat->connections && at < count; node = next) {
        next = node->next;
        heartbeat_connection *each = connection_of(node);
        while (at < count && heartbeat->watched_names[at] != each->event.connection)
            at++;
        if (at < count && heartbeat->watched[at].revents != 0)
            (void)heartbeat_hear(heartbeat, each);
    }
}

static void *heartbeat_main(void *argument)
{
    pccl_heartbeat *heartbeat = argument;
    int64_t turn_ms = heartbeat->interval_ms / TURNS_PER_HEARTBEAT;
    int64_t turn_due_ms = heartbeat->turned_ms + (turn_ms > 0 ? turn_ms : 1);
    nfds_t count = 1;
    for (;;) {
        int64_t left_ms = turn_due_ms - pccl_now_ms();
        int found = poll(heartbeat->watched, count, left_ms > 0 ? (int)left_ms : 0);
        if (found > 0 && heartbeat->watched[0].revents != 0)
            return NULL;
        int64_t now_ms = pccl_now_ms();
        pthread_mutex_lock(&heartbeat->mutex);
        if (found > 0)
            heartbeat_hear_closed(heartbeat, count);
        if (now_ms >= turn_due_ms) {
            heartbeat_turn(heartbeat, now_ms);
            turn_due_ms = now_ms + (turn_ms > 0 ? turn_ms : 1);
        }
        count = heartbeat_watch(heartbeat);
        pthread_mutex_unlock(&heartbeat->mutex);
    }
}

/* The callers */

static void heartbeat_free_all(pccl_heartbeat *heartbeat, pccl_list *list)
{
    while (!pccl_list_is_empty(list)) {
        heartbeat_connection *first = connection_of(list->next);
        if (first->event.kind == 0)
            pccl_fd_registry_close(heartbeat->fds, first->fd);
        pccl_list_remove(&first->in_list);
        free(first);
    }
}

static void heartbeat_free(pccl_heartbeat *heartbeat)
{
    heartbeat_free_all(heartbeat, &heartbeat->connections);
    heartbeat_free_all(heartbeat, &heartbeat->reported);
    pccl_wake_close(&heartbeat->stop);
    pccl_wake_close(&heartbeat->news);
    pccl_fd_registry_destroy(heartbeat->fds);
    pthread_mutex_destroy(&heartbeat->mutex);
    free(heartbeat->watched);
    free(heartbeat->watched_names);
    free(heartbeat);
}

static pccl_heartbeat *heartbeat_create_failed(
    pccl_heartbeat *heartbeat, const char *what, int system_error, char *error, size_t error_bytes)
{
    pccl_say_system_error(error, error_bytes, what, system_error);
    if (heartbeat != NULL)
        heartbeat_free(heartbeat);
    return NULL;
}

pccl_heartbeat *pccl_heartbeat_create(uint32_t timeout_ms, char *error, size_t error_bytes)
{
    if (timeout_ms == 0)
        return heartbeat_create_failed(NULL, "a timeout of 0 ms", EINVAL, error, error_bytes);
    pccl_heartbeat *heartbeat = calloc(1, sizeof *heartbeat);
    if (heartbeat == NULL)
        return heartbeat_create_failed(NULL, "heartbeat", ENOMEM, error, error_bytes);
    int rc = pthread_mutex_init(&heartbeat->mutex, NULL);
    if (rc != 0) {
        free(heartbeat);
        return heartbeat_create_failed(NULL, "pthread_mutex_init", rc, error, error_bytes);
    }
    pccl_list_init(&heartbeat->connections);
    pccl_list_init(&heartbeat->reported);
    heartbeat->stop.read_fd = heartbeat->stop.write_fd = heartbeat->news.read_fd = heartbeat->news.write_fd = -1;
    heartbeat->timeout_ms = timeout_ms;
    heartbeat->interval_ms = timeout_ms / HEARTBEATS_PER_TIMEOUT;
    if (heartbeat->interval_ms > HEARTBEAT_INTERVAL_MS_MAX)
        heartbeat->interval_ms = HEARTBEAT_INTERVAL_MS_MAX;
    heartbeat->turned_ms = pccl_now_ms();
    heartbeat->fds = pccl_fd_registry_create();
    if (heartbeat->fds == NULL)
        return heartbeat_create_failed(heartbeat, "heartbeat", ENOMEM, error, error_bytes);
    if (!heartbeat_make_room(heartbeat, 1))
        return heartbeat_create_failed(heartbeat, "heartbeat", ENOMEM, error, error_bytes);
    if (pccl_wake_open(&heartbeat->stop) != 0 || pccl_wake_open(&heartbeat->news) != 0)
        return heartbeat_create_failed(heartbeat, "eventfd or pipe", errno, error, error_bytes);
    heartbeat->watched[0] = (struct pollfd){.fd = heartbeat->stop.read_fd, .events = POLLIN, .revents = 0};
    rc = pccl_thread_start(&heartbeat->thread, "pccl-heartbeat", heartbeat_main, heartbeat);
    if (rc != 0)
        return heartbeat_create_failed(heartbeat, "pthread_create", rc, error, error_bytes);
    return heartbeat;
}

void pccl_heartbeat_destroy(pccl_heartbeat *heartbeat)
{
    if (heartbeat == NULL)
        return;
    pccl_wake_signal(&heartbeat->stop);
    pthread_join(heartbeat->thread, NULL);
    heartbeat_free(heartbeat);
}

void pccl_heartbeat_forget_after_fork(pccl_heartbeat *heartbeat)
{
    pccl_fd_registry_forget(heartbeat->fds);
    pccl_wake_close(&heartbeat->stop);
    pccl_wake_close(&heartbeat->news);
}

int pccl_heartbeat_event_fd(const pccl_heartbeat *heartbeat) { return heartbeat->news.read_fd; }

int pccl_heartbeat_poll_events(pccl_heartbeat *heartbeat, pccl_heartbeat_event *events, int events_max)
{
    int count = 0;
    pthread_mutex_lock(&heartbeat->mutex);
    int had_some = !pccl_list_is_empty(&heartbeat->reported);
    for (; count < events_max && !pccl_list_is_empty(&heartbeat->reported); count++) {
        heartbeat_connection *first = connection_of(heartbeat->reported.next);
        events[count] = first->event;
        pccl_list_remove(&first->in_list);
        free(first);
    }
    if (had_some && pccl_list_is_empty(&heartbeat->reported))
        pccl_wake_clear(&heartbeat->news);
    pthread_mutex_unlock(&heartbeat->mutex);
    return count;
}

static int heartbeat_list_quiet(
    const heartbeat_connection *each, int64_t since_ms, uint64_t *connections, int count, int connections_max)
{
    if (each->heard_ms > since_ms || count >= connections_max)
        return count;
    connections[count] = each->event.connection;
    return count + 1;
}

int pccl_heartbeat_quiet(pccl_heartbeat *heartbeat, uint32_t quiet_ms, uint64_t *connections, int connections_max)
{
    int count = 0;
    pthread_mutex_lock(&heartbeat->mutex);
    int64_t since_ms = heartbeat->turned_ms - quiet_ms;
    pccl_list *node;
    for (node = heartbeat->connections.next; node != &heartbeat->connections; node = node->next)
        count = heartbeat_list_quiet(connection_of(node), since_ms, connections, count, connections_max);
    for (node = heartbeat->reported.next; node != &heartbeat->reported; node = node->next)
        count = heartbeat_list_quiet(connection_of(node), since_ms, connections, count, connections_max);
    pthread_mutex_unlock(&heartbeat->mutex);
    return count;
}

static int heartbeat_prepare_socket(int fd)
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

int pccl_heartbeat_add(pccl_heartbeat *heartbeat, uint64_t connection, int fd)
{
    if (fd < 0)
        return PCCL_E_INVALID;
    if (pccl_fd_registry_add(heartbeat->fds, fd) != 0) {
        close(fd);
        return PCCL_E_INVALID;
    }
    int status = PCCL_E_SYSTEM;
    heartbeat_connection *added = NULL;
    if (heartbeat_prepare_socket(fd) == 0) {
        status = PCCL_E_MEMORY;
        added = calloc(1, sizeof *added);
    }
    if (added == NULL) {
        pccl_fd_registry_close(heartbeat->fds, fd);
        return status;
    }
    added->fd = fd;
    added->event.connection = connection;
    pccl_list_init(&added->in_list);
    added->heard_ms = pccl_now_ms();
    heartbeat_send(added); /* the other side need not wait for our next turn */
    pthread_mutex_lock(&heartbeat->mutex);
    pccl_list_append(&heartbeat->connections, &added->in_list);
    pthread_mutex_unlock(&heartbeat->mutex);
    return 0;
}

void pccl_progress_turn(pccl_progress *progress) { __atomic_fetch_add(&progress->turns, 1, __ATOMIC_RELAXED); }
void pccl_progress_look(pccl_progress *progress) { __atomic_fetch_add(&progress->looks, 1, __ATOMIC_RELAXED); }

void pccl_heartbeat_vouch(pccl_heartbeat *heartbeat, const pccl_progress *progress, uint32_t hold_ms, uint32_t still_ms)
{
    pthread_mutex_lock(&heartbeat->mutex);
    heartbeat->progress = progress;
    heartbeat->hold_ms = hold_ms;
    heartbeat->still_ms = still_ms;
    heartbeat_note_progress(heartbeat, pccl_now_ms());
    pthread_mutex_unlock(&heartbeat->mutex);
}

static heartbeat_connection *heartbeat_find(pccl_list *list, uint64_t connection)
{
    for (pccl_list *node = list->next; node != list; node = node->next)
        if (connection_of(node)->event.connection == connection)
            return connection_of(node);
    return NULL;
}

void pccl_heartbeat_remove(pccl_heartbeat *heartbeat, uint64_t connection)
{
    pthread_mutex_lock(&heartbeat->mutex);
    heartbeat_connection *found = heartbeat_find(&heartbeat->connections, connection);
    if (found != NULL) {
        pccl_fd_registry_close(heartbeat->fds, found->fd);
    } else {
        found = heartbeat_find(&heartbeat->reported, connection);
    }
    if (found != NULL) {
        int was_reported = found->event.kind != 0;
        pccl_list_remove(&found->in_list);
        if (was_reported && pccl_list_is_empty(&heartbeat->reported))
            pccl_wake_clear(&heartbeat->news);
    }
    pthread_mutex_unlock(&heartbeat->mutex);
    free(found);
}
