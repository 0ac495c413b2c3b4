/* udp_stream.h: a reliable stream of bytes each way over datagrams that may be lost, repeated, delayed or swapped, as
 * arithmetic. No I/O, no clock. wire_udp.c gives it datagrams and sends those that it makes.
 *
 * Datagrams. Each has a header and a kind:
 *
 *     bytes  0..7    SipHash-2-4 of all that follows, under the sender's key. The two keys of a connection come from a
 *                    secret that its ends exchange over an authenticated connection, and which no other connection
 *                    has. They identify the connection: packets with another hash are ignored
 *     bytes  8..15   the packet's number, from 0, and in the top byte the kind
 *     bytes 16..23   DATA: the stream's offset of the bytes that follow; none, to be acknowledged only
 *                    ACK: the stream's offset up to which all bytes have arrived
 *
 * A packet that is lost is not repeated: its bytes go into a packet with a number of its own, as in QUIC (RFC 9002). So
 * an acknowledgement tells which packet has arrived, and how long its round trip took. ACKs are not acknowledged. They
 * list the latest ACK_RANGES ranges of numbers that have arrived, how far the sender may go, and how many packets were
 * duplicates.
 *
 * Loss. A packet is lost when one sent REORDER_PACKETS later has arrived, or one sent later and a round trip and an
 * eighth have passed. Packets that arrive twice show that this was too hasty, on a path that swaps packets: then time
 * alone counts, and more of it. Where no new bytes are left to be sent, lost ones are sent again twice: a second loss
 * would cost a round trip more. Without an answer for a while a probe is sent; after some probes all is taken for lost.
 *
 * Congestion control is BBR's (bbr.h). Packets leave in bursts of QUANTUM_US.
 *
 * Memory. Each direction has a ring for the bytes from the first one not acknowledged (not read) on. Rings grow when
 * more is in flight, up to BUFFER_BYTES_MAX: the only time at which memory is allocated. */
#ifndef PCCL_UDP_STREAM_H
#define PCCL_UDP_STREAM_H

#include "pccl_native.h"

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

enum {
    PCCL_UDP_HEADER_BYTES = 24,
    PCCL_UDP_DATAGRAM_BYTES_MIN = 1200, /* any path carries these */
    PCCL_UDP_DATAGRAM_BYTES_MAX = 1472,
    PCCL_UDP_BUFFER_BYTES_MAX = 32 << 20
};

typedef struct pccl_udp_stream pccl_udp_stream;

/* A datagram to be sent: the header, then the payload, which stays where it is until the next write or input. */
typedef struct {
    uint8_t header[PCCL_UDP_HEADER_BYTES];
    const uint8_t *payload;
    size_t payload_bytes;
} pccl_udp_datagram;

typedef struct {
    uint64_t sent_packets; /* DATA */
    uint64_t delivered_packets;
    uint64_t delivered_bytes;
    uint64_t lost_packets;
    uint64_t duplicate_packets; /* of ours, that the other end had already */
    uint64_t in_flight_packets;
    uint64_t acked_bytes; /* of the stream */
    uint64_t unacked_bytes; /* of the stream, taken and not acknowledged */
    uint64_t unsent_bytes; /* of these, never sent */
    uint64_t rate; /* of the path, bytes per second */
    int64_t round_trip_us; /* smoothed; 0: not known */
    int64_t round_trip_us_min;
    int64_t busy_us; /* with bytes that are not acknowledged */
    int64_t window_us; /* of that, held back by the other end's buffer or by this one's */
    int64_t receiver_us; /* of that, by the other end's */
    size_t datagram_bytes;
    uint8_t is_open; /* packets of this end have arrived */
    uint8_t has_ended; /* the other end has closed */
} pccl_udp_stats;

/* NULL: no memory. `is_dialer` differs between the two ends. */
pccl_udp_stream *pccl_udp_stream_create(const uint8_t secret[PCCL_UDP_SECRET_BYTES], int is_dialer, int64_t now_ns);
void pccl_udp_stream_free(pccl_udp_stream *stream);

/* Bytes to be sent: returns how many were taken, and copied. As many unsent ones may there be at most. */
size_t pccl_udp_stream_write(
    pccl_udp_stream *stream, const struct iovec *iov, int count, size_t unsent_bytes_max, int64_t now_ns);

/* Bytes that have arrived, as far as they lie in one piece, and how many of these are of no more use. */
const uint8_t *pccl_udp_stream_peek(const pccl_udp_stream *stream, size_t *bytes);
void pccl_udp_stream_consume(pccl_udp_stream *stream, size_t bytes);

/* A datagram has arrived, at that time. NULL, or the rule that the other end has broken. A datagram that is not from the
 * other end is ignored: is_foreign. */
const char *pccl_udp_stream_input(
    pccl_udp_stream *stream, const uint8_t *datagram, size_t bytes, int64_t now_ns, int *is_foreign);

/* Returns how many datagrams are to be sent now; call it until there are none. All but the last have the size of the
 * first one. */
int pccl_udp_stream_output(pccl_udp_stream *stream, int64_t now_ns, pccl_udp_datagram *datagrams, int max);

/* A datagram of this size is too large for the path. */
void pccl_udp_stream_note_too_large(pccl_udp_stream *stream, size_t bytes);

/* Returns the datagram that ends the stream. It is not repeated if it is lost. */
pccl_udp_datagram pccl_udp_stream_close(pccl_udp_stream *stream);

/* When to call pccl_udp_stream_output again, at the latest. INT64_MAX: after the next write or input. */
int64_t pccl_udp_stream_deadline_ns(const pccl_udp_stream *stream);

void pccl_udp_stream_read_stats(const pccl_udp_stream *stream, pccl_udp_stats *stats);

#endif
