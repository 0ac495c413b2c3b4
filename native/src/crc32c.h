/* crc32c.h: the Castagnoli checksum (RFC 3720, appendix B.4) of what goes over the wire.
 *
 * Several ways to the same number; the first, from tables, is the specification. The engine uses the fastest
 * that the CPU has.
 *
 *     tables        slicing by 8
 *     instruction   the CPU's CRC32C of 8 bytes (SSE4.2, ARMv8), three chains at a time to hide its latency
 *     folding       carry-less multiplication of 512 bits at a time (AVX-512 with VPCLMULQDQ)
 *
 * In cache, on a Zen 5: 1.6, 32 and 65 GB/s. Folding by 256 bits was no faster than the instruction, and so
 * is left out.
 *
 * All tables and constants are computed from the polynomial on first use. */
#ifndef PCCL_CRC32C_H
#define PCCL_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Returns the checksum of the bytes that `crc` is the checksum of, followed by these; 0 is the checksum of nothing. */
uint32_t pccl_crc32c(uint32_t crc, const void *data, size_t bytes);

/* Does the same, and copies the bytes to where they are not wanted soon: by folding both are one pass, which writes
 * past the caches. */
uint32_t pccl_crc32c_copy(uint32_t crc, void *to, const void *from, size_t bytes);

/* For tests and benchmarks. */
enum pccl_crc32c_way {
    PCCL_CRC32C_TABLES = 0,
    PCCL_CRC32C_INSTRUCTION = 1,
    PCCL_CRC32C_FOLDING = 2,
    PCCL_CRC32C_WAY_COUNT = 3
};

int pccl_crc32c_has(enum pccl_crc32c_way way);
uint32_t pccl_crc32c_by(enum pccl_crc32c_way way, uint32_t crc, const void *data, size_t bytes);

#endif
