/* wire.h: the transport under a connection (conn.h): an interface, and its types.
 *
 * A wire carries bytes in order, in both directions, to the same connection of the other end, or breaks. Frames,
 * acknowledgments and loss are the connection's. Nothing blocks, and sending and receiving allocate nothing. A new
 * type is a new table of functions; docs/design/engine.md lists the places that change.
 *
 * One thread owns a wire. The types are
 *
 *     wire_tcp.c      a stream socket
 *     wire_shm.c      memory that two processes of one host share
 *     wire_udp.c      a connected datagram socket, for lossy paths
 *     wire_sealed.c   encrypted records over another wire */
#ifndef PCCL_WIRE_H
#define PCCL_WIRE_H

#include "fd_registry.h"
#include "pccl_native.h"
#include "poller.h"
#include "udp_stream.h"

#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

/* What keeps a wire from sending, and what was delivered, since it began. */
typedef struct {
    uint64_t busy_us; /* with something to send or to be acknowledged */
    uint64_t acked_bytes;
    uint64_t unsent_bytes; /* right now: given to the system, which may not send it yet */
    uint64_t window_us; /* of that, held back by a full send buffer or receive window, not by the network */
    uint64_t receiver_us; /* of that, by the receive window: the other end does not read */
    uint64_t round_trip_us;
    uint64_t round_trip_us_min;
    uint32_t delivered; /* segments, in whatever order */
    uint32_t resent; /* segments that were lost: pccl_tcp_resent */
    uint32_t unacked; /* segments, right now */
    uint32_t segment_bytes;
} pccl_wire_limits;

enum {
    PCCL_WIRE_UNSENT_BYTES_MAX = 256 << 10, /* given to the system, which may not send it yet */
    PCCL_WIRE_IOV_MAX = 16 /* parts to be sent, none of them empty */
};

typedef struct pccl_wire pccl_wire;

typedef struct {
    /* Has the poller watch for PCCL_POLL_IN; `owner` becomes the entry's. 0, or -1 with errno set. */
    int (*watch)(pccl_wire *wire, pccl_poller *poller, void *owner);
    void (*want)(pccl_wire *wire, unsigned interest); /* what a watched wire is watched for: PCCL_POLL_ */

    /* Returns what an event of the poller means, PCCL_POLL_; NULL: what it says. */
    unsigned (*ready)(pccl_wire *wire, const pccl_poll_event *event);

    /* Ends the watch, closes the descriptors and frees the wire. */
    void (*close)(pccl_wire *wire);

    /* Returns the bytes taken, and may change `iov`. Fewer than given, or held_bytes: wait for PCCL_POLL_OUT, and send
     * again, perhaps 0 bytes. What was taken may be overwritten. Negative: -errno. */
    ssize_t (*send)(pccl_wire *wire, struct iovec *iov, int count);

    /* One of the two receives, and the other is NULL. Returns the bytes received; 0: the end; negative: -errno, -EAGAIN
     * without bytes. After `receive`, fewer bytes than there is room for: there are no more now. `view` shows bytes in
     * place, until its next call. It has to be called until -EAGAIN: the poller does not know what it has read. Without
     * `may_read` it reads no more. */
    ssize_t (*receive)(pccl_wire *wire, const struct iovec *iov, int count);
    ssize_t (*view)(pccl_wire *wire, const uint8_t **at, int may_read);

    /* Bounds unsent bytes: what one wire has taken, a faster one cannot carry. */
    void (*bound_unsent)(pccl_wire *wire, int bytes);

    /* The bytes that the other end's system has not acknowledged, and those of them that this one has not sent. 0, or
     * -1: not known. */
    int (*under_way)(const pccl_wire *wire, uint64_t *in_flight_bytes, uint64_t *unsent_bytes);

    /* 0, or -1: not known. `limits` is what was read before, or zeros. */
    int (*read_limits)(const pccl_wire *wire, pccl_wire_limits *limits);
} pccl_wire_type;

struct pccl_wire {
    const pccl_wire_type *type;
    uint8_t is_local; /* the other end is on this machine */
    uint8_t yields_to_loss; /* its congestion control takes any loss for congestion */
    uint8_t is_authentic; /* bytes arrive as they were sent: payload needs no checksum */
    uint8_t takes_over; /* its link's other connections carry nothing meanwhile; the end of the peer's process shows on
                           them alone */
    const char *broken; /* why, where an error is no system call's */
    size_t held_bytes; /* taken, and not handed to the system */
    uint64_t sent_bytes; /* on the network */
    uint64_t received_bytes;
};

/* Makes a wire of a connected stream socket, which it takes, also on failure. 0 or PCCL_E_. */
int pccl_wire_tcp_open(pccl_fd_registry *fds, int fd, pccl_wire **made);

/* Makes a wire of shared memory and of a connected stream socket to the process that has the memory's other end; no byte
 * travels on the socket. Takes both, also on failure. 0 or PCCL_E_. */
int pccl_wire_shm_open(pccl_fd_registry *fds, int fd, pccl_memory *memory, pccl_wire **made);

/* Makes a wire of a connected datagram socket, which it takes, also on failure. The other end does so at the same time,
 * with the same secret, and is no dialer. The wire breaks if no datagram gets through within a second, or later if
 * none comes for a second, or for four round trips, while bytes are to be acknowledged. 0 or PCCL_E_: PCCL_E_SYSTEM also
 * where there is no such wire. */
int pccl_wire_udp_open(
    pccl_fd_registry *fds, int fd, const uint8_t secret[PCCL_UDP_SECRET_BYTES], int is_dialer, pccl_wire **made);

/* Puts a wire that encrypts in the place of *wire, which must have `receive` and which it owns from then on. 0, or
 * PCCL_E_ without a change. */
int pccl_wire_seal(pccl_wire **wire, const pccl_link_keys *keys);

/* Returns the segments that were lost, of those that were sent again: the receiver had got the others (`in_vain`), as
 * when its process stood still for longer than a round trip takes. That comes to be known a round trip later, so what
 * was said `before` may be too much: then it stays for a while. */
uint32_t pccl_tcp_resent(uint32_t before, uint32_t resent, uint32_t in_vain);

#endif
