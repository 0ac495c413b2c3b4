#include "tcp_limits.h"

#if defined(__linux__)
#include <linux/tcp.h> /* the C library's struct tcp_info lacks the later fields, and the two headers clash */
#include <netinet/in.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>

uint32_t pccl_tcp_resent(uint32_t before, uint32_t resent, uint32_t in_vain)
{
    uint32_t lost = resent - (in_vain < resent ? in_vain : resent);
    return lost > before ? lost : before;
}

int pccl_tcp_yields_to_loss(int fd)
{
    enum { FAR_US = 2000, NAME_BYTES = 16 };
    char name[NAME_BYTES + 1] = "";
    socklen_t bytes = NAME_BYTES;
    pccl_tcp_limits limits;
    if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &bytes) != 0)
        return 0;
    if (strcmp(name, "cubic") != 0 && strcmp(name, "reno") != 0)
        return 0;
    memset(&limits, 0, sizeof limits);
    int is_far = pccl_tcp_limits_read(fd, &limits) == 0 && limits.round_trip_us_min >= FAR_US;
    return !is_far || setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "bbr", 3) != 0;
}

int pccl_tcp_limits_read(int fd, pccl_tcp_limits *limits)
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

#else

int pccl_tcp_yields_to_loss(int fd)
{
    (void)fd;
    return 0;
}

int pccl_tcp_limits_read(int fd, pccl_tcp_limits *limits)
{
    (void)fd;
    (void)limits;
    return -1;
}

#endif
