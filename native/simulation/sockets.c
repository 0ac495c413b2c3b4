/* sockets.c: pairs of sockets in memory as wires (wire.h), and descriptors that wake; simulated.h says what may happen
 * to them. */
#include "sim.h"

#include "list.h"
#include "os.h"
#include "wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum end_kind { END_NONE, END_CLOSED, END_RESET };

enum { ACKED_SEGMENT_BYTES = 1448, ROUND_TRIP_US = 300, PARTIAL_ONE_IN = 2 };

/* One end, with the direction in which it sends. */
typedef struct {
    int peer; /* its index; -1: it only wakes */
    int is_open;
    int is_signaled; /* of one that only wakes */
    int error; /* an errno that calls return from now on */
    int is_limited;
    int64_t opened_ms;
    uint8_t *bytes; /* sent and not read: those that have arrived first */
    size_t count;
    size_t arrived;
    size_t capacity;
    uint64_t carried; /* bytes in all */
    enum end_kind end; /* comes after the bytes */
    int has_end_arrived;
    int is_blocked;
} sim_socket;

static sim_socket *sockets;
static int sockets_count;
static int sockets_capacity;
static int first_live; /* those before are closed, and nothing is under way from them */

static sim_socket *socket_at(int fd)
{
    int index = fd - SIM_FD_FIRST;
    return index >= 0 && index < sockets_count ? &sockets[index] : NULL;
}

static sim_socket *open_socket(int fd)
{
    sim_socket *found = socket_at(fd);
    return found != NULL && found->is_open ? found : NULL;
}

static sim_socket *peer_of(const sim_socket *of) { return &sockets[of->peer]; }

static int socket_add(int peer, int capacity_bytes)
{
    if (sockets_count == sockets_capacity) {
        sockets_capacity = sockets_capacity == 0 ? 256 : 2 * sockets_capacity;
        sockets = realloc(sockets, (size_t)sockets_capacity * sizeof *sockets);
        PCCL_ASSERT(sockets != NULL);
    }
    sim_socket *made = &sockets[sockets_count];
    memset(made, 0, sizeof *made);
    made->peer = peer;
    made->is_open = 1;
    made->capacity = (size_t)capacity_bytes;
    made->opened_ms = pccl_sim_now_ms();
    if (capacity_bytes > 0) {
        made->bytes = malloc(made->capacity);
        PCCL_ASSERT(made->bytes != NULL);
    }
    return sockets_count++;
}

void sim_reset_sockets(void)
{
    for (int i = 0; i < sockets_count; i++)
        free(sockets[i].bytes);
    sockets_count = first_live = 0;
}

void pccl_sim_connect(int capacity_bytes, int32_t fds[2])
{
    int first = socket_add(sockets_count + 1, capacity_bytes);
    int second = socket_add(first, capacity_bytes);
    fds[0] = SIM_FD_FIRST + first;
    fds[1] = SIM_FD_FIRST + second;
}

/* Nonzero if there is something to be carried. */
static int has_under_way(const sim_socket *of)
{
    return of->peer >= 0 && (of->count > of->arrived || (of->end != END_NONE && !of->has_end_arrived));
}

/* Forgets what is sent there: it has no reader. */
static void socket_drain(sim_socket *of) { of->count = of->arrived = 0; }

/* How much is taken of what could be. */
static size_t some_of(size_t bytes)
{
    return bytes > 1 && sim_happens(PARTIAL_ONE_IN) ? 1 + sim_draw((uint32_t)bytes - 1) : bytes;
}

/* The wire */

typedef struct {
    pccl_wire wire;
    pccl_poller *poller; /* NULL: not watched */
    pccl_poll_entry poll;
} sim_wire;

static sim_wire *sim_wire_of(pccl_wire *wire) { return PCCL_CONTAINER_OF(wire, sim_wire, wire); }

static int sim_wire_fd(const pccl_wire *wire) { return PCCL_CONTAINER_OF(wire, const sim_wire, wire)->poll.fd; }

static size_t iov_bytes(const struct iovec *iov, int count)
{
    size_t bytes = 0;
    for (int i = 0; i < count; i++)
        bytes += iov[i].iov_len;
    return bytes;
}

static int sim_wire_watch(pccl_wire *wire, pccl_poller *poller, void *owner)
{
    sim_wire *of = sim_wire_of(wire);
    of->poll.owner = owner;
    of->poller = poller;
    return pccl_poller_add(poller, &of->poll, of->poll.fd, PCCL_POLL_IN);
}

static void sim_wire_want(pccl_wire *wire, unsigned interest)
{
    pccl_poller_change(sim_wire_of(wire)->poller, &sim_wire_of(wire)->poll, interest);
}

static ssize_t sim_wire_send(pccl_wire *wire, struct iovec *iov, int iov_count)
{
    sim_socket *from = open_socket(sim_wire_fd(wire));
    if (from == NULL)
        return -EBADF;
    if (from->error != 0)
        return -from->error;
    size_t room = from->end == END_NONE ? from->capacity - from->count : 0;
    if (room == 0)
        return 0;
    size_t left = some_of(pccl_min_size(room, iov_bytes(iov, iov_count)));
    size_t taken = left;
    for (size_t i = 0; left > 0; i++) {
        size_t n = pccl_min_size(left, iov[i].iov_len);
        memcpy(from->bytes + from->count, iov[i].iov_base, n);
        from->count += n;
        left -= n;
    }
    wire->sent_bytes += taken;
    return (ssize_t)taken;
}

static ssize_t sim_wire_receive(pccl_wire *wire, const struct iovec *iov, int iov_count)
{
    sim_socket *to = open_socket(sim_wire_fd(wire));
    if (to == NULL)
        return -EBADF;
    sim_socket *from = peer_of(to);
    if (from->arrived == 0) {
        if (to->error != 0)
            return -to->error;
        if (!from->has_end_arrived)
            return -EAGAIN;
        return from->end == END_RESET ? -ECONNRESET : 0;
    }
    size_t n = some_of(pccl_min_size(iov_bytes(iov, iov_count), from->arrived));
    size_t at = 0;
    for (int i = 0; at < n; i++) {
        size_t part = pccl_min_size(n - at, iov[i].iov_len);
        memcpy(iov[i].iov_base, from->bytes + at, part);
        at += part;
    }
    memmove(from->bytes, from->bytes + n, from->count - n);
    from->count -= n;
    from->arrived -= n;
    wire->received_bytes += n;
    return (ssize_t)n;
}

static void socket_close(int fd)
{
    sim_socket *closed = open_socket(fd);
    if (closed == NULL)
        return;
    closed->is_open = 0;
    if (closed->peer < 0)
        return;
    sim_socket *peer = peer_of(closed);
    if (closed->end == END_NONE)
        closed->end = peer->arrived > 0 ? END_RESET : END_CLOSED; /* as a system that has unread bytes */
    socket_drain(peer);
    if (!peer->is_open)
        socket_drain(closed);
}

static void sim_wire_close(pccl_wire *wire)
{
    sim_wire *of = sim_wire_of(wire);
    if (of->poller != NULL)
        pccl_poller_remove(of->poller, &of->poll);
    socket_close(of->poll.fd);
    free(of);
}

static void sim_wire_bound_unsent(pccl_wire *wire, int bytes)
{
    (void)wire;
    (void)bytes;
}

static int sim_wire_under_way(const pccl_wire *wire, uint64_t *in_flight_bytes, uint64_t *unsent_bytes)
{
    const sim_socket *of = open_socket(sim_wire_fd(wire));
    *in_flight_bytes = *unsent_bytes = 0;
    if (of == NULL)
        return -1;
    *in_flight_bytes = of->count - of->arrived;
    return 0;
}

static int sim_wire_read_limits(const pccl_wire *wire, pccl_wire_limits *limits)
{
    const sim_socket *of = open_socket(sim_wire_fd(wire));
    if (of == NULL)
        return -1;
    uint64_t open_us = (uint64_t)(pccl_sim_now_ms() - of->opened_ms) * 1000;
    memset(limits, 0, sizeof *limits);
    limits->busy_us = open_us;
    limits->window_us = of->is_limited ? open_us : 0;
    limits->acked_bytes = of->carried;
    limits->unsent_bytes = (uint32_t)(of->is_limited ? of->count - of->arrived : 0);
    limits->round_trip_us = limits->round_trip_us_min = ROUND_TRIP_US;
    limits->delivered = (uint32_t)(of->carried / ACKED_SEGMENT_BYTES);
    limits->segment_bytes = ACKED_SEGMENT_BYTES;
    return 0;
}

static const pccl_wire_type sim_type = {
    .watch = sim_wire_watch,
    .want = sim_wire_want,
    .close = sim_wire_close,
    .send = sim_wire_send,
    .receive = sim_wire_receive,
    .bound_unsent = sim_wire_bound_unsent,
    .under_way = sim_wire_under_way,
    .read_limits = sim_wire_read_limits,
};

int pccl_wire_tcp_open(pccl_fd_registry *fds, int fd, pccl_wire **made)
{
    (void)fds;
    sim_wire *of = calloc(1, sizeof *of);
    *made = NULL;
    if (of == NULL) {
        socket_close(fd);
        return PCCL_E_MEMORY;
    }
    of->wire.type = &sim_type;
    of->poll.fd = fd;
    *made = &of->wire;
    return 0;
}

int pccl_wire_udp_open(
    pccl_fd_registry *fds, int fd, const uint8_t secret[PCCL_UDP_SECRET_BYTES], int is_dialer, pccl_wire **made)
{
    (void)secret;
    (void)is_dialer;
    int status = pccl_wire_tcp_open(fds, fd, made);
    if (status == 0)
        (*made)->takes_over = 1;
    return status;
}

/* Descriptors that wake */

int pccl_wake_open(pccl_wake *wake)
{
    wake->read_fd = wake->write_fd = SIM_FD_FIRST + socket_add(-1, 0);
    return 0;
}

void pccl_wake_close(pccl_wake *wake)
{
    if (wake->read_fd >= 0)
        socket_close(wake->read_fd);
    wake->read_fd = wake->write_fd = -1;
}

static int wake_set(const pccl_wake *wake, int is_signaled)
{
    sim_socket *found = open_socket(wake->read_fd);
    if (found == NULL)
        return EBADF;
    found->is_signaled = is_signaled;
    return 0;
}

int pccl_wake_signal(const pccl_wake *wake) { return wake_set(wake, 1); }

int pccl_wake_clear(const pccl_wake *wake) { return wake_set(wake, 0); }

unsigned sim_ready_for(int fd)
{
    const sim_socket *of = open_socket(fd);
    if (of == NULL)
        return PCCL_POLL_IN;
    if (of->peer < 0)
        return of->is_signaled ? PCCL_POLL_IN : 0;
    const sim_socket *from = peer_of(of);
    int is_over = of->error != 0 || from->has_end_arrived;
    return (from->arrived > 0 || is_over ? PCCL_POLL_IN : 0u) |
           ((of->end == END_NONE && of->count < of->capacity) || of->error != 0 ? (unsigned)PCCL_POLL_OUT : 0u);
}

int pccl_sim_is_readable(int fd) { return (sim_ready_for(fd) & PCCL_POLL_IN) != 0; }

/* The network */

int pccl_sim_under_way(int fd)
{
    const sim_socket *of = socket_at(fd);
    return of != NULL ? (int)(of->count - of->arrived) : 0;
}

int pccl_sim_sending(int32_t *fds, int fds_max)
{
    int count = 0;
    int is_first = 1;
    for (int i = first_live; i < sockets_count && count < fds_max; i++) {
        if (has_under_way(&sockets[i]))
            fds[count++] = SIM_FD_FIRST + i;
        else if (is_first && !sockets[i].is_open) {
            first_live = i + 1;
            continue;
        }
        is_first = 0;
    }
    return count;
}

int pccl_sim_carry(int fd, int bytes)
{
    sim_socket *from = socket_at(fd);
    PCCL_ASSERT(from != NULL && from->peer >= 0);
    sim_socket *to = peer_of(from);
    size_t n = pccl_min_size((size_t)bytes, from->count - from->arrived);
    from->arrived += n;
    from->carried += n;
    if (!to->is_open) {
        if (n > 0 && from->is_open && from->error == 0)
            from->error = ECONNRESET; /* it has no reader */
        socket_drain(from);
    }
    if (from->count == from->arrived && from->end != END_NONE) {
        from->has_end_arrived = 1;
        if (from->end == END_RESET && to->error == 0)
            to->error = ECONNRESET;
    }
    return (int)n;
}

int sim_carry_all(void)
{
    int were_any = 0;
    for (int i = first_live; i < sockets_count; i++)
        if (!sockets[i].is_blocked && has_under_way(&sockets[i])) {
            pccl_sim_carry(SIM_FD_FIRST + i, (int)sockets[i].capacity);
            were_any = 1;
        }
    return were_any;
}

void pccl_sim_block(int fd, int is_blocked)
{
    sim_socket *of = socket_at(fd);
    if (of != NULL)
        of->is_blocked = is_blocked;
}

void pccl_sim_damage(int fd, int at, int bit)
{
    sim_socket *of = socket_at(fd);
    PCCL_ASSERT(of != NULL && at >= 0 && (size_t)at < of->count - of->arrived);
    of->bytes[of->arrived + (size_t)at] ^= (uint8_t)(1 << bit);
}

static void socket_cut(sim_socket *from, int bytes)
{
    from->count = from->arrived + pccl_min_size((size_t)bytes, from->count - from->arrived);
    from->end = END_RESET;
    from->has_end_arrived = 0;
}

void pccl_sim_break(int fd, int bytes, int bytes_back)
{
    sim_socket *from = socket_at(fd);
    PCCL_ASSERT(from != NULL && from->peer >= 0);
    socket_cut(from, bytes);
    socket_cut(peer_of(from), bytes_back);
}

void pccl_sim_abandon(int fd, int lost_bytes)
{
    sim_socket *of = open_socket(fd);
    if (of == NULL)
        return;
    of->count -= pccl_min_size((size_t)lost_bytes, of->count - of->arrived);
    if (lost_bytes > 0)
        of->end = END_RESET;
    socket_close(fd);
}

int pccl_sim_is_closed(int fd) { return open_socket(fd) == NULL; }

void pccl_sim_limit(int fd, int is_limited)
{
    sim_socket *of = socket_at(fd);
    if (of != NULL)
        of->is_limited = is_limited;
}

void pccl_sim_reset(uint64_t seed, int is_random)
{
    sim_reset_fibers();
    sim_reset_sockets();
    sim_seed(seed, is_random);
}
