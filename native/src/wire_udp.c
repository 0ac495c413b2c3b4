/* wire_udp.c: a reliable stream over UDP (udp_stream.h) as a wire. Linux only; elsewhere there is none.
 *
 * The poller watches three descriptors: the socket for datagrams, a timer for what the stream does by itself (pacing,
 * acknowledgements, probes), and an event counter that is writable while the stream takes bytes. The wire's owner gets
 * PCCL_POLL_IN for the first two and looks at the wire, which does all three.
 *
 * Datagrams leave and arrive in batches: one system call for a batch of equal ones where the system cuts and joins them
 * (UDP_SEGMENT, UDP_GRO). */
#include "wire.h"

#include "base.h"

#if defined(__linux__)

#include "list.h"
#include "os.h"
#include "udp_stream.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

enum {
    OUT_BATCH = 40, /* of the largest datagrams: less than 64 KiB */
    IN_BATCH = 32,
    IN_BYTES = 64 << 10, /* of joined datagrams */
    IN_STRIDE = IN_BYTES + 2112, /* so that the beginnings do not share a few lines of the cache */
    SOCKET_BUFFER_BYTES = 4 << 20
};

PCCL_STATIC_ASSERT(OUT_BATCH *PCCL_UDP_DATAGRAM_BYTES_MAX < 65000, batch_in_one_datagram);

#define SILENT_NS_MAX INT64_C(1000000000)
#define RETRY_NS INT64_C(1000000)
#define NS_PER_S INT64_C(1000000000)
#define COUNTER_FULL (UINT64_MAX - 1)

typedef struct {
    pccl_wire wire;
    pccl_fd_registry *fds;
    pccl_poller *poller; /* NULL: not watched */
    pccl_poll_entry socket;
    pccl_poll_entry timer;
    pccl_poll_entry room; /* the event counter */
    pccl_udp_stream *stream;
    int64_t heard_ns; /* when a datagram came last, or no bytes were to be acknowledged */
    int64_t opened_ns;
    int64_t armed_ns; /* INT64_MAX: the timer is off */
    size_t unsent_bytes_max;
    uint8_t is_full; /* the counter is not writable */
    uint8_t has_left; /* bytes that the owner has had no room for, and of which no descriptor shows anything */
    uint8_t joins; /* the system cuts datagrams */
    int pending_first; /* of the batch: those that the system has not taken */
    int pending_end;
    pccl_udp_datagram pending[OUT_BATCH];
    struct iovec iov[2 * OUT_BATCH];
    struct mmsghdr messages[OUT_BATCH > IN_BATCH ? OUT_BATCH : IN_BATCH];
    struct iovec in_iov[IN_BATCH];
    union {
        size_t align;
        uint8_t bytes[CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(struct timespec))];
    } in_control[IN_BATCH];
    uint8_t *in;
} udp_wire;

static udp_wire *udp_of(pccl_wire *wire) { return PCCL_CONTAINER_OF(wire, udp_wire, wire); }

/* Life */

static void udp_close(pccl_wire *wire)
{
    udp_wire *udp = udp_of(wire);
    pccl_poll_entry *entries[] = {&udp->socket, &udp->timer, &udp->room};
    if (udp->stream != NULL && udp->socket.fd >= 0) {
        pccl_udp_datagram d = pccl_udp_stream_close(udp->stream);
        for (int i = 0; i < 2; i++)
            (void)send(udp->socket.fd, d.header, sizeof d.header, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    for (size_t i = 0; i < PCCL_COUNT_OF(entries); i++) {
        if (udp->poller != NULL)
            pccl_poller_remove(udp->poller, entries[i]);
        if (entries[i]->fd >= 0)
            pccl_fd_registry_close(udp->fds, entries[i]->fd);
    }
    pccl_udp_stream_free(udp->stream);
    free(udp->in);
    free(udp);
}

static int udp_watch(pccl_wire *wire, pccl_poller *poller, void *owner)
{
    udp_wire *udp = udp_of(wire);
    pccl_poll_entry *entries[] = {&udp->socket, &udp->timer, &udp->room};
    for (size_t i = 0; i < PCCL_COUNT_OF(entries); i++) {
        entries[i]->owner = owner;
        if (pccl_poller_add(poller, entries[i], entries[i]->fd, i < 2 ? PCCL_POLL_IN : 0) == 0)
            continue;
        int saved = errno;
        while (i-- > 0)
            pccl_poller_remove(poller, entries[i]);
        errno = saved;
        return -1;
    }
    udp->poller = poller;
    return 0;
}

static void udp_want(pccl_wire *wire, unsigned interest)
{
    udp_wire *udp = udp_of(wire);
    pccl_poller_change(udp->poller, &udp->socket, interest & PCCL_POLL_IN);
    pccl_poller_change(udp->poller, &udp->timer, interest & PCCL_POLL_IN);
    pccl_poller_change(udp->poller, &udp->room, interest & PCCL_POLL_OUT);
}

/* Out */

static void udp_gather(udp_wire *udp, int first, int end)
{
    for (int i = first; i < end; i++) {
        pccl_udp_datagram *d = &udp->pending[i];
        struct iovec *iov = &udp->iov[2 * i];
        iov[0].iov_base = d->header;
        iov[0].iov_len = sizeof d->header;
        iov[1].iov_base = (void *)(uintptr_t)d->payload;
        iov[1].iov_len = d->payload_bytes;
    }
}

/* Sends the batch as one datagram that the system cuts. Returns as sendmsg does. */
static ssize_t udp_send_joined(udp_wire *udp)
{
    union {
        size_t align;
        uint8_t bytes[CMSG_SPACE(sizeof(uint16_t))];
    } control;
    struct msghdr message;
    memset(&message, 0, sizeof message);
    memset(&control, 0, sizeof control);
    message.msg_iov = &udp->iov[2 * udp->pending_first];
    message.msg_iovlen = 2 * (size_t)(udp->pending_end - udp->pending_first);
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = IPPROTO_UDP;
    header->cmsg_type = UDP_SEGMENT;
    header->cmsg_len = CMSG_LEN(sizeof(uint16_t));
    uint16_t bytes = (uint16_t)(sizeof(udp->pending[0].header) + udp->pending[udp->pending_first].payload_bytes);
    memcpy(CMSG_DATA(header), &bytes, sizeof bytes);
    return sendmsg(udp->socket.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Returns how many of the batch have been sent, or -1. */
static int udp_send_each(udp_wire *udp)
{
    int count = udp->pending_end - udp->pending_first;
    for (int i = 0; i < count; i++) {
        struct msghdr *message = &udp->messages[i].msg_hdr;
        memset(message, 0, sizeof *message);
        message->msg_iov = &udp->iov[2 * (udp->pending_first + i)];
        message->msg_iovlen = 2;
    }
    return sendmmsg(udp->socket.fd, udp->messages, (unsigned)count, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Sends the pending datagrams. Nonzero if none is left. */
static int udp_flush(udp_wire *udp)
{
    udp_gather(udp, udp->pending_first, udp->pending_end);
    while (udp->pending_first < udp->pending_end) {
        int is_joined = udp->joins && udp->pending_end - udp->pending_first > 1;
        ssize_t n = is_joined ? udp_send_joined(udp) : udp_send_each(udp);
        if (n >= 0) {
            udp->pending_first = is_joined ? udp->pending_end : udp->pending_first + (int)n;
            continue;
        }
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM)
            return 0;
        if (errno == EINTR)
            continue;
        if (is_joined && (errno == EINVAL || errno == EIO || errno == EOPNOTSUPP)) {
            udp->joins = 0; /* not by this device */
            continue;
        }
        const pccl_udp_datagram *d = &udp->pending[udp->pending_first];
        if (errno == EMSGSIZE)
            pccl_udp_stream_note_too_large(udp->stream, sizeof d->header + d->payload_bytes);
        /* What the system does not send is lost, as on the way. A refusal may be of an earlier datagram. */
        udp->pending_first++;
    }
    return 1;
}

/* Sets the timer, unless it fires before: then it is set again. */
static void udp_arm(udp_wire *udp, int64_t ns, int64_t now_ns)
{
    if (ns >= udp->armed_ns && udp->armed_ns > now_ns)
        return;
    struct itimerspec when;
    memset(&when, 0, sizeof when);
    udp->armed_ns = ns;
    if (ns != INT64_MAX) {
        ns = ns > now_ns ? ns : now_ns + 1;
        when.it_value.tv_sec = (time_t)(ns / NS_PER_S);
        when.it_value.tv_nsec = (long)(ns % NS_PER_S);
    }
    (void)timerfd_settime(udp->timer.fd, TFD_TIMER_ABSTIME, &when, NULL);
}

static void udp_set_full(udp_wire *udp, int is_full)
{
    if (udp->is_full == is_full)
        return;
    udp->is_full = (uint8_t)is_full;
    uint64_t count = COUNTER_FULL;
    ssize_t n;
    do
        n = is_full ? write(udp->room.fd, &count, sizeof count) : read(udp->room.fd, &count, sizeof count);
    while (n < 0 && errno == EINTR);
}

/* Sends what may be sent now, and sets the timer for the rest. */
static void udp_pump(udp_wire *udp)
{
    int64_t now_ns = pccl_now_ns();
    int is_stuck = 0;
    for (;;) {
        if (udp->pending_first == udp->pending_end) {
            udp->pending_first = 0;
            udp->pending_end = pccl_udp_stream_output(udp->stream, now_ns, udp->pending, OUT_BATCH);
            if (udp->pending_end == 0)
                break;
        }
        is_stuck = !udp_flush(udp);
        if (is_stuck)
            break;
    }
    pccl_udp_stats stats;
    pccl_udp_stream_read_stats(udp->stream, &stats);
    if (stats.unacked_bytes == 0)
        udp->heard_ns = now_ns;
    int64_t deadline_ns = is_stuck ? now_ns + RETRY_NS : pccl_udp_stream_deadline_ns(udp->stream);
    udp_arm(udp, udp->has_left ? now_ns : deadline_ns, now_ns);
    if (udp->is_full && !is_stuck && stats.unsent_bytes <= udp->unsent_bytes_max / 2 &&
        stats.unacked_bytes < PCCL_UDP_BUFFER_BYTES_MAX)
        udp_set_full(udp, 0);
}

static ssize_t udp_send(pccl_wire *wire, struct iovec *iov, int count)
{
    udp_wire *udp = udp_of(wire);
    size_t given_bytes = 0;
    for (int i = 0; i < count; i++)
        given_bytes += iov[i].iov_len;
    /* A write may move what is pending. */
    if (udp->pending_first != udp->pending_end)
        udp_pump(udp);
    size_t taken_bytes = 0;
    if (udp->pending_first == udp->pending_end) {
        int64_t now_ns = pccl_now_ns();
        pccl_udp_stats stats;
        pccl_udp_stream_read_stats(udp->stream, &stats);
        if (stats.unacked_bytes == 0)
            udp->heard_ns = now_ns; /* there was nothing to hear since then */
        taken_bytes = pccl_udp_stream_write(udp->stream, iov, count, udp->unsent_bytes_max, now_ns);
        if (taken_bytes < given_bytes)
            udp_set_full(udp, 1);
        udp_pump(udp);
    } else {
        udp_set_full(udp, 1);
    }
    wire->sent_bytes += taken_bytes;
    return (ssize_t)taken_bytes;
}

/* In */

/* 0, or -1: the other end has broken a rule. */
static int udp_input(udp_wire *udp, const uint8_t *at, size_t bytes, size_t each_bytes, int64_t now_ns)
{
    for (; bytes > 0; at += each_bytes, bytes -= each_bytes) {
        int is_foreign;
        each_bytes = pccl_min_size(each_bytes, bytes);
        udp->wire.broken = pccl_udp_stream_input(udp->stream, at, each_bytes, now_ns, &is_foreign);
        if (udp->wire.broken != NULL)
            return -1;
        if (is_foreign)
            continue;
        udp->wire.received_bytes += each_bytes;
        udp->heard_ns = now_ns;
    }
    return 0;
}

/* For how long a datagram has waited in the socket. */
static int64_t udp_waited_ns(const struct timespec *real, const uint8_t *stamp)
{
    struct timespec came;
    memcpy(&came, stamp, sizeof came);
    int64_t ns = (int64_t)(real->tv_sec - came.tv_sec) * NS_PER_S + (real->tv_nsec - came.tv_nsec);
    return ns > 0 && ns < NS_PER_S ? ns : 0;
}

/* Returns how many messages have come, or -1: the other end has broken a rule. */
static int udp_take_batch(udp_wire *udp)
{
    for (int i = 0; i < IN_BATCH; i++) {
        struct msghdr *message = &udp->messages[i].msg_hdr;
        memset(message, 0, sizeof *message);
        udp->in_iov[i].iov_base = udp->in + (size_t)i * IN_STRIDE;
        udp->in_iov[i].iov_len = IN_BYTES;
        message->msg_iov = &udp->in_iov[i];
        message->msg_iovlen = 1;
        message->msg_control = &udp->in_control[i];
        message->msg_controllen = sizeof udp->in_control[i];
    }
    int count;
    do
        count = recvmmsg(udp->socket.fd, udp->messages, IN_BATCH, MSG_DONTWAIT, NULL);
    while (count < 0 && errno == EINTR);
    if (count < 0)
        return 0; /* none, or an ICMP error, which has the effect of silence */
    struct timespec real;
    clock_gettime(CLOCK_REALTIME, &real);
    int64_t now_ns = pccl_now_ns();
    for (int i = 0; i < count; i++) {
        size_t bytes = udp->messages[i].msg_len;
        int each_bytes = (int)bytes;
        struct msghdr *message = &udp->messages[i].msg_hdr;
        int64_t waited_ns = 0;
        for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c != NULL; c = CMSG_NXTHDR(message, c)) {
            if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO)
                memcpy(&each_bytes, CMSG_DATA(c), sizeof each_bytes);
            else if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SO_TIMESTAMPNS)
                waited_ns = udp_waited_ns(&real, CMSG_DATA(c));
        }
        if (each_bytes > 0 &&
            udp_input(udp, udp->in_iov[i].iov_base, bytes, (size_t)each_bytes, now_ns - waited_ns) != 0)
            return -1;
    }
    return count;
}

/* Copies bytes that have arrived to where there is room. Returns how many. */
static size_t udp_copy(udp_wire *udp, const struct iovec *iov, int count, size_t skip)
{
    size_t copied_bytes = 0;
    pccl_udp_stats stats;
    pccl_udp_stream_read_stats(udp->stream, &stats);
    if (!stats.is_open)
        return 0; /* a path in one direction is none */
    for (int i = 0; i < count; i++) {
        size_t at = pccl_min_size(skip, iov[i].iov_len);
        skip -= at;
        while (at < iov[i].iov_len) {
            size_t bytes;
            const uint8_t *from = pccl_udp_stream_peek(udp->stream, &bytes);
            bytes = pccl_min_size(bytes, iov[i].iov_len - at);
            if (bytes == 0)
                return copied_bytes;
            memcpy((uint8_t *)iov[i].iov_base + at, from, bytes);
            pccl_udp_stream_consume(udp->stream, bytes);
            copied_bytes += bytes;
            at += bytes;
        }
    }
    return copied_bytes;
}

/* Nonzero if datagrams do not get through, or no longer. */
static int udp_is_silent(const udp_wire *udp, const pccl_udp_stats *stats)
{
    int64_t now_ns = pccl_now_ns();
    int64_t silent_ns_max = 4000 * stats->round_trip_us;
    if (!stats->is_open)
        return now_ns - udp->opened_ns > SILENT_NS_MAX;
    silent_ns_max = silent_ns_max > SILENT_NS_MAX ? silent_ns_max : SILENT_NS_MAX;
    return stats->unacked_bytes > 0 && now_ns - udp->heard_ns > silent_ns_max;
}

static ssize_t udp_receive(pccl_wire *wire, const struct iovec *iov, int count)
{
    udp_wire *udp = udp_of(wire);
    size_t room_bytes = 0;
    for (int i = 0; i < count; i++)
        room_bytes += iov[i].iov_len;
    /* A process that comes half a second after its timer was stopped, and cannot know what it would have heard. */
    int64_t now_ns = pccl_now_ns();
    if (udp->armed_ns < now_ns - SILENT_NS_MAX / 2)
        udp->heard_ns = now_ns;
    size_t copied_bytes = udp_copy(udp, iov, count, 0);
    for (int is_dry = 0; copied_bytes < room_bytes && !is_dry && wire->broken == NULL;) {
        int taken = udp_take_batch(udp);
        is_dry = taken < IN_BATCH;
        copied_bytes += udp_copy(udp, iov, count, copied_bytes);
    }
    size_t left_bytes;
    (void)pccl_udp_stream_peek(udp->stream, &left_bytes);
    udp->has_left = left_bytes > 0;
    udp_pump(udp);
    if (copied_bytes > 0)
        return (ssize_t)copied_bytes;
    pccl_udp_stats stats;
    pccl_udp_stream_read_stats(udp->stream, &stats);
    if (wire->broken == NULL && stats.has_ended)
        return 0;
    if (wire->broken == NULL && udp_is_silent(udp, &stats))
        wire->broken = stats.is_open ? "UDP no longer gets through" : "UDP does not get through";
    return wire->broken != NULL ? -EPROTO : -EAGAIN;
}

/* What is known of it */

static void udp_bound_unsent(pccl_wire *wire, int bytes) { udp_of(wire)->unsent_bytes_max = (size_t)bytes; }

static int udp_under_way(const pccl_wire *wire, uint64_t *in_flight_bytes, uint64_t *unsent_bytes)
{
    pccl_udp_stats stats;
    pccl_udp_stream_read_stats(PCCL_CONTAINER_OF(wire, const udp_wire, wire)->stream, &stats);
    *in_flight_bytes = stats.unacked_bytes;
    *unsent_bytes = stats.unsent_bytes;
    return 0;
}

static int udp_read_limits(const pccl_wire *wire, pccl_wire_limits *limits)
{
    pccl_udp_stats stats;
    pccl_udp_stream_read_stats(PCCL_CONTAINER_OF(wire, const udp_wire, wire)->stream, &stats);
    limits->busy_us = (uint64_t)stats.busy_us;
    limits->acked_bytes = stats.acked_bytes;
    limits->unsent_bytes = stats.unsent_bytes;
    limits->window_us = (uint64_t)stats.window_us;
    limits->receiver_us = (uint64_t)stats.receiver_us;
    limits->round_trip_us = (uint64_t)stats.round_trip_us;
    limits->round_trip_us_min = (uint64_t)stats.round_trip_us_min;
    limits->delivered = (uint32_t)stats.delivered_packets;
    limits->resent = pccl_tcp_resent(limits->resent, (uint32_t)stats.lost_packets, (uint32_t)stats.duplicate_packets);
    limits->unacked = (uint32_t)stats.in_flight_packets;
    limits->segment_bytes = (uint32_t)stats.datagram_bytes;
    return 0;
}

static const pccl_wire_type udp_type = {
    .watch = udp_watch,
    .want = udp_want,
    .close = udp_close,
    .send = udp_send,
    .receive = udp_receive,
    .bound_unsent = udp_bound_unsent,
    .under_way = udp_under_way,
    .read_limits = udp_read_limits,
};

/* 0, or -1 with errno set. */
static int udp_prepare(int fd, uint8_t *joins)
{
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
        return -1;
    int on = 1;
    int bytes = SOCKET_BUFFER_BYTES;
    int probe = IP_PMTUDISC_PROBE; /* datagrams are not cut, and what the system takes for the path's size is ignored */
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    (void)setsockopt(fd, IPPROTO_IP, IP_MTU_DISCOVER, &probe, sizeof probe);
    (void)setsockopt(fd, IPPROTO_IPV6, IPV6_MTU_DISCOVER, &probe, sizeof probe);
    (void)setsockopt(fd, IPPROTO_UDP, UDP_GRO, &on, sizeof on);
    (void)setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on); /* since this process may run late */
    int none = 0;
    *joins = setsockopt(fd, IPPROTO_UDP, UDP_SEGMENT, &none, sizeof none) == 0;
    return 0;
}

int pccl_wire_udp_open(
    pccl_fd_registry *fds, int fd, const uint8_t secret[PCCL_UDP_SECRET_BYTES], int is_dialer, pccl_wire **made)
{
    *made = NULL;
    udp_wire *udp = calloc(1, sizeof *udp);
    if (udp == NULL) {
        close(fd);
        return PCCL_E_MEMORY;
    }
    udp->wire.type = &udp_type;
    udp->wire.is_authentic = udp->wire.takes_over = 1;
    udp->fds = fds;
    udp->unsent_bytes_max = PCCL_WIRE_UNSENT_BYTES_MAX;
    udp->armed_ns = INT64_MAX;
    udp->opened_ns = udp->heard_ns = pccl_now_ns();
    udp->in = malloc((size_t)IN_BATCH * IN_STRIDE);
    udp->stream = pccl_udp_stream_create(secret, is_dialer, udp->opened_ns);
    int status = udp->in != NULL && udp->stream != NULL ? 0 : PCCL_E_MEMORY;
    udp->socket.fd = fd;
    udp->timer.fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    udp->room.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (status == 0 && (udp->timer.fd < 0 || udp->room.fd < 0 || udp_prepare(fd, &udp->joins) != 0))
        status = PCCL_E_SYSTEM;
    pccl_poll_entry *entries[] = {&udp->socket, &udp->timer, &udp->room};
    for (size_t i = 0; i < PCCL_COUNT_OF(entries); i++)
        if (entries[i]->fd >= 0 && pccl_fd_registry_add(fds, entries[i]->fd) != 0) {
            close(entries[i]->fd);
            entries[i]->fd = -1;
            status = PCCL_E_INVALID;
        }
    if (status != 0) {
        udp_close(&udp->wire);
        return status;
    }
    udp_pump(udp);
    *made = &udp->wire;
    return 0;
}

#else

#include <unistd.h>

int pccl_wire_udp_open(
    pccl_fd_registry *fds, int fd, const uint8_t secret[PCCL_UDP_SECRET_BYTES], int is_dialer, pccl_wire **made)
{
    (void)fds;
    (void)secret;
    (void)is_dialer;
    *made = NULL;
    close(fd);
    return PCCL_E_SYSTEM;
}

#endif
