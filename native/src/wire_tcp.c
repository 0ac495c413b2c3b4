/* wire_tcp.c: a stream socket as a wire. With TCP_NOTSENT_LOWAT, "taken" means nearly on the network, not merely copied
 * to a deep socket buffer: that makes faster connections carry more. Inside a machine the network is memory, and a
 * buffer of a few megabytes, the default of systems, has left the caches by the time it is read; there the buffer is
 * bounded. */
#include "wire.h"

#include "base.h"
#include "growth.h"
#include "list.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/sockios.h>
#include <linux/tcp.h> /* the C library's struct tcp_info lacks the later fields, and the two headers clash */
#include <sys/ioctl.h>
#else
#include <netinet/tcp.h>
#endif

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* SO_NOSIGPIPE does it */
#endif

enum {
    LOCAL_SEND_BUFFER_BYTES = 256 << 10 /* 64 MiB between two ranks and four took a tenth less than with 4 MiB */
};

typedef struct {
    pccl_wire wire;
    pccl_fd_registry *fds;
    pccl_poller *poller; /* NULL: not watched */
    pccl_poll_entry poll;
} tcp_wire;

static tcp_wire *tcp_of(pccl_wire *wire) { return PCCL_CONTAINER_OF(wire, tcp_wire, wire); }

static int tcp_fd(const pccl_wire *wire) { return PCCL_CONTAINER_OF(wire, const tcp_wire, wire)->poll.fd; }

/* Life */

static void socket_bound_unsent(int fd, int bytes)
{
#ifdef TCP_NOTSENT_LOWAT
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &bytes, sizeof bytes);
#else
    (void)fd;
    (void)bytes;
#endif
}

/* 0, or -1 with errno set. */
static int socket_prepare(int fd)
{
    int on = 1;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
        return -1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* fails on what is not TCP */
    socket_bound_unsent(fd, PCCL_WIRE_UNSENT_BYTES_MAX);
#ifdef SO_NOSIGPIPE
    (void)setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
    return 0;
}

static int socket_is_local(int fd)
{
    struct sockaddr_storage ends[2];
    socklen_t sizes[2] = {sizeof ends[0], sizeof ends[1]};
    if (getsockname(fd, (struct sockaddr *)&ends[0], &sizes[0]) != 0 ||
        getpeername(fd, (struct sockaddr *)&ends[1], &sizes[1]) != 0)
        return 0;
    if (ends[0].ss_family == AF_INET)
        return memcmp(&((struct sockaddr_in *)&ends[0])->sin_addr, &((struct sockaddr_in *)&ends[1])->sin_addr,
                   sizeof(struct in_addr)) == 0;
    if (ends[0].ss_family == AF_INET6)
        return memcmp(&((struct sockaddr_in6 *)&ends[0])->sin6_addr, &((struct sockaddr_in6 *)&ends[1])->sin6_addr,
                   sizeof(struct in6_addr)) == 0;
    return ends[0].ss_family == AF_UNIX;
}

/* Makes the send buffer at most so large; never larger than it is. */
static void socket_bound_send_buffer(int fd, int bytes)
{
    int present_bytes = 0;
    socklen_t size = sizeof present_bytes;
    if (getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &present_bytes, &size) == 0 && present_bytes > 2 * bytes)
        (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

static int tcp_watch(pccl_wire *wire, pccl_poller *poller, void *owner)
{
    tcp_wire *tcp = tcp_of(wire);
    tcp->poll.owner = owner;
    if (pccl_poller_add(poller, &tcp->poll, tcp->poll.fd, PCCL_POLL_IN) != 0)
        return -1;
    tcp->poller = poller;
    return 0;
}

static void tcp_want(pccl_wire *wire, unsigned interest)
{
    tcp_wire *tcp = tcp_of(wire);
    pccl_poller_change(tcp->poller, &tcp->poll, interest);
}

static void tcp_close(pccl_wire *wire)
{
    tcp_wire *tcp = tcp_of(wire);
    if (tcp->poller != NULL)
        pccl_poller_remove(tcp->poller, &tcp->poll);
    pccl_fd_registry_close(tcp->fds, tcp->poll.fd);
    free(tcp);
}

/* Bytes */

static ssize_t tcp_send(pccl_wire *wire, struct iovec *iov, int count)
{
    struct msghdr message;
    ssize_t n;
    memset(&message, 0, sizeof message);
    message.msg_iov = iov;
    message.msg_iovlen = (size_t)count;
    do
        n = sendmsg(tcp_fd(wire), &message, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -errno;
    wire->sent_bytes += (uint64_t)n;
    return n;
}

static ssize_t tcp_receive(pccl_wire *wire, const struct iovec *iov, int count)
{
    ssize_t n;
    do
        n = readv(tcp_fd(wire), iov, count);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EWOULDBLOCK ? -EAGAIN : -errno;
    wire->received_bytes += (uint64_t)n;
    return n;
}

/* What the system knows of it */

static void tcp_bound_unsent(pccl_wire *wire, int bytes) { socket_bound_unsent(tcp_fd(wire), bytes); }

static int tcp_under_way(const pccl_wire *wire, uint64_t *in_flight_bytes, uint64_t *unsent_bytes)
{
    *in_flight_bytes = *unsent_bytes = 0;
#if defined(__linux__)
    int bytes;
    if (ioctl(tcp_fd(wire), SIOCOUTQNSD, &bytes) == 0)
        *unsent_bytes = (uint64_t)bytes;
    if (ioctl(tcp_fd(wire), SIOCOUTQ, &bytes) != 0)
        return -1;
    *in_flight_bytes = (uint64_t)bytes;
    return 0;
#elif defined(SO_NWRITE)
    int bytes;
    socklen_t size = sizeof bytes;
    if (getsockopt(tcp_fd(wire), SOL_SOCKET, SO_NWRITE, &bytes, &size) != 0)
        return -1;
    *in_flight_bytes = (uint64_t)bytes;
    return 0;
#else
    (void)wire;
    return -1;
#endif
}

uint32_t pccl_tcp_resent(uint32_t before, uint32_t resent, uint32_t in_vain)
{
    uint32_t lost = resent - (in_vain < resent ? in_vain : resent);
    return lost > before ? lost : before;
}

#if defined(__linux__)

static int socket_read_limits(int fd, pccl_wire_limits *limits)
{
    struct tcp_info info;
    socklen_t bytes = sizeof info;
    memset(&info, 0, sizeof info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0 ||
        bytes < offsetof(struct tcp_info, tcpi_sndbuf_limited) + sizeof info.tcpi_sndbuf_limited)
        return -1;
    limits->busy_us = info.tcpi_busy_time;
    limits->acked_bytes = info.tcpi_bytes_acked;
    limits->unsent_bytes = info.tcpi_notsent_bytes;
    limits->window_us = info.tcpi_rwnd_limited + info.tcpi_sndbuf_limited;
    limits->receiver_us = info.tcpi_rwnd_limited;
    limits->round_trip_us = info.tcpi_rtt;
    limits->round_trip_us_min = info.tcpi_min_rtt;
    limits->delivered = info.tcpi_delivered;
    limits->resent = pccl_tcp_resent(limits->resent, info.tcpi_total_retrans, info.tcpi_dsack_dups);
    limits->unacked = info.tcpi_unacked;
    limits->segment_bytes = info.tcpi_snd_mss;
    return 0;
}

/* Nonzero if the connection's congestion control takes any loss for congestion, as CUBIC and Reno do. Where the round
 * trip is long and the system lets this process choose BBR, it does from now on. */
static int socket_yields_to_loss(int fd)
{
    enum { NAME_BYTES = 16 };
    char name[NAME_BYTES + 1] = "";
    socklen_t bytes = NAME_BYTES;
    pccl_wire_limits limits;
    if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &bytes) != 0)
        return 0;
    if (strcmp(name, "cubic") != 0 && strcmp(name, "reno") != 0)
        return 0;
    memset(&limits, 0, sizeof limits);
    int is_far = socket_read_limits(fd, &limits) == 0 && limits.round_trip_us_min >= PCCL_FAR_US;
    return !is_far || setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "bbr", 3) != 0;
}

#else

static int socket_read_limits(int fd, pccl_wire_limits *limits)
{
    (void)fd;
    (void)limits;
    return -1;
}

static int socket_yields_to_loss(int fd)
{
    (void)fd;
    return 0;
}

#endif

static int tcp_read_limits(const pccl_wire *wire, pccl_wire_limits *limits)
{
    return socket_read_limits(tcp_fd(wire), limits);
}

static const pccl_wire_type tcp_type = {
    .watch = tcp_watch,
    .want = tcp_want,
    .close = tcp_close,
    .send = tcp_send,
    .receive = tcp_receive,
    .bound_unsent = tcp_bound_unsent,
    .under_way = tcp_under_way,
    .read_limits = tcp_read_limits,
};

int pccl_wire_tcp_open(pccl_fd_registry *fds, int fd, pccl_wire **made)
{
    *made = NULL;
    if (pccl_fd_registry_add(fds, fd) != 0) {
        close(fd);
        return PCCL_E_INVALID;
    }
    int status = socket_prepare(fd) == 0 ? 0 : PCCL_E_SYSTEM;
    tcp_wire *tcp = status == 0 ? calloc(1, sizeof *tcp) : NULL;
    if (tcp == NULL) {
        pccl_fd_registry_close(fds, fd);
        return status != 0 ? status : PCCL_E_MEMORY;
    }
    tcp->wire.type = &tcp_type;
    tcp->fds = fds;
    tcp->poll.fd = fd;
    tcp->wire.is_local = (uint8_t)socket_is_local(fd);
    if (tcp->wire.is_local)
        socket_bound_send_buffer(fd, LOCAL_SEND_BUFFER_BYTES);
    else
        tcp->wire.yields_to_loss = (uint8_t)socket_yields_to_loss(fd);
    *made = &tcp->wire;
    return 0;
}
