/* wire_shm.h: what two processes see of the memory that they share (wire_shm.c). */
#ifndef PCCL_WIRE_SHM_H
#define PCCL_WIRE_SHM_H

#include "base.h"
#include "pccl_native.h"

enum {
    PCCL_RING_BYTES = 512 << 10, /* a power of two; those of all links had better stay in a cache */
    PCCL_MEMORY_HEADER_BYTES = 4096,
    PCCL_MEMORY_BYTES = PCCL_MEMORY_HEADER_BYTES + 2 * PCCL_RING_BYTES,
    PCCL_MEMORY_NONCE_BYTES = 16
};

/* One direction. The two processes write to different cache lines. */
typedef struct {
    uint64_t written; /* bytes, by the sender */
    uint32_t writer_waits;
    uint8_t pad_1[116];
    uint64_t consumed; /* of them, by the receiver */
    uint32_t reader_sleeps;
    uint8_t pad_2[116];
} pccl_ring;

/* The bytes of the rings follow. */
typedef struct {
    uint8_t nonce[PCCL_MEMORY_NONCE_BYTES];
    uint8_t pad[112];
    pccl_ring rings[2]; /* what the maker of the memory sends; what it receives */
} pccl_memory_header;

PCCL_STATIC_ASSERT(sizeof(pccl_memory_header) <= PCCL_MEMORY_HEADER_BYTES, header_in_its_place);

/* How the other process finds the memory. */
typedef struct {
    uint32_t pid;
    uint32_t memory_fd;
    uint32_t wake_fds[2]; /* of the maker, of the other process */
    uint8_t nonce[PCCL_MEMORY_NONCE_BYTES];
} pccl_memory_offer;

PCCL_STATIC_ASSERT(sizeof(pccl_memory_offer) == PCCL_MEMORY_OFFER_BYTES, offer_bytes);

#endif
