/* Every way to a CRC32C equals a bit-by-bit one and the published vectors.
 *
 *     test_crc bench        measures them */
#include "check.h"
#include "crc32c.h"
#include "base.h"
#include "noise.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char *const way_names[PCCL_CRC32C_WAY_COUNT] = {"tables", "instruction", "folding"};

static uint32_t bit_by_bit(uint32_t crc, const uint8_t *data, size_t bytes)
{
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
    }
    return ~crc;
}

static uint8_t *noise(size_t bytes)
{
    uint8_t *data = malloc(bytes);
    if (data != NULL)
        noise_fill(data, bytes);
    return data;
}

/* RFC 3720, appendix B.4, and the check value of the usual catalogues. */
static void published_vectors(void)
{
    /* clang-format off */
    static const uint8_t scsi_read[48] = {
        0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0, 0, 0x04, 0,
        0, 0, 0, 0x14, 0, 0, 0, 0x18, 0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0, 0};
    /* clang-format on */
    uint8_t zeros[32], ones[32], up[32], down[32];
    memset(zeros, 0, sizeof zeros);
    memset(ones, 0xff, sizeof ones);
    for (int i = 0; i < 32; i++) {
        up[i] = (uint8_t)i;
        down[i] = (uint8_t)(31 - i);
    }
    const struct {
        const void *data;
        size_t bytes;
        uint32_t crc;
    } vectors[] = {
        {"", 0, 0},
        {"123456789", 9, 0xe3069283u},
        {zeros, 32, 0x8a9136aau},
        {ones, 32, 0x62a8ab43u},
        {up, 32, 0x46dd794eu},
        {down, 32, 0x113fdb5cu},
        {scsi_read, 48, 0xd9963a56u},
    };
    for (size_t i = 0; i < PCCL_COUNT_OF(vectors); i++) {
        CHECK_MSG(pccl_crc32c(0, vectors[i].data, vectors[i].bytes) == vectors[i].crc, "vector %zu", i);
        for (int way = 0; way < PCCL_CRC32C_WAY_COUNT; way++)
            if (pccl_crc32c_has(way))
                CHECK_MSG(pccl_crc32c_by(way, 0, vectors[i].data, vectors[i].bytes) == vectors[i].crc,
                    "vector %zu by %s", i, way_names[way]);
    }
}

/* Long enough for every loop of every way, to the bit-by-bit one; the long ones to the tables. */
static void all_ways_agree(void)
{
    enum { LENGTH_MAX = 900, BYTES = 120000 };
    uint8_t *data = noise(BYTES);
    REQUIRE(data != NULL);
    for (size_t bytes = 0; bytes <= LENGTH_MAX; bytes++) {
        const uint8_t *at = data + noise_u32() % 64;
        uint32_t crc = noise_u32();
        uint32_t expected = bit_by_bit(crc, at, bytes);
        for (int way = 0; way < PCCL_CRC32C_WAY_COUNT; way++)
            if (pccl_crc32c_has(way))
                CHECK_MSG(pccl_crc32c_by(way, crc, at, bytes) == expected, "%zu bytes by %s", bytes, way_names[way]);
    }
    for (int i = 0; i < 200; i++) {
        size_t bytes = noise_u32() % (BYTES - 64);
        const uint8_t *at = data + noise_u32() % 64;
        uint32_t crc = noise_u32();
        uint32_t expected = pccl_crc32c_by(PCCL_CRC32C_TABLES, crc, at, bytes);
        for (int way = 1; way < PCCL_CRC32C_WAY_COUNT; way++)
            if (pccl_crc32c_has(way))
                CHECK_MSG(pccl_crc32c_by(way, crc, at, bytes) == expected, "%zu bytes by %s", bytes, way_names[way]);
    }
    free(data);
}

/* As payload comes: in any part_sizes. */
static void parts_add_up(void)
{
    enum { BYTES = 20000 };
    uint8_t *data = noise(BYTES);
    REQUIRE(data != NULL);
    uint32_t whole = pccl_crc32c(0, data, BYTES);
    for (int i = 0; i < 100; i++) {
        uint32_t crc = 0;
        for (size_t at = 0; at < BYTES;) {
            size_t bytes = pccl_min_size(BYTES - at, noise_u32() % 2000);
            crc = pccl_crc32c(crc, data + at, bytes);
            at += bytes;
        }
        CHECK(crc == whole);
    }
    free(data);
}

static void copies_are_checked_as_they_are_made(void)
{
    enum { LENGTH_MAX = 40000, MARGIN = 64 };
    static uint8_t to[LENGTH_MAX + 2 * MARGIN], expected[LENGTH_MAX + 2 * MARGIN];
    uint8_t *data = noise(LENGTH_MAX + MARGIN);
    REQUIRE(data != NULL);
    for (int i = 0; i < 2000; i++) {
        size_t bytes = noise_u32() % (i % 10 == 0 ? LENGTH_MAX : 900);
        size_t at = noise_u32() % MARGIN;
        const uint8_t *from = data + noise_u32() % MARGIN;
        uint32_t crc = noise_u32();
        memset(to, 0xa5, sizeof to);
        memset(expected, 0xa5, sizeof expected);
        memcpy(expected + at, from, bytes);
        CHECK(pccl_crc32c_copy(crc, to + at, from, bytes) == pccl_crc32c(crc, from, bytes));
        CHECK(memcmp(to, expected, sizeof to) == 0);
    }
    free(data);
}

static void every_flipped_bit_shows(void)
{
    enum { BYTES = 700 };
    uint8_t *data = noise(BYTES);
    REQUIRE(data != NULL);
    uint32_t crc = pccl_crc32c(0, data, BYTES);
    for (int bit = 0; bit < 8 * BYTES; bit++) {
        data[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK(pccl_crc32c(0, data, BYTES) != crc);
        data[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    free(data);
}

static void bench(void)
{
    enum { BYTES = 64 << 20 };
    static const size_t part_sizes[] = {72, 16 << 10, 256 << 10, BYTES};
    uint8_t *data = noise(BYTES);
    REQUIRE(data != NULL);
    for (int way = 0; way < PCCL_CRC32C_WAY_COUNT; way++)
        for (size_t i = 0; pccl_crc32c_has(way) && i < PCCL_COUNT_OF(part_sizes); i++) {
            double best_s = 1e9;
            uint32_t crc = 0;
            for (int repeat = 0; repeat < 7; repeat++) {
                struct timespec begin, end;
                clock_gettime(CLOCK_MONOTONIC, &begin);
                for (size_t k = BYTES / part_sizes[i] / 4; k-- > 0 || part_sizes[i] == BYTES;) {
                    crc = pccl_crc32c_by(way, crc, data, part_sizes[i]);
                    if (part_sizes[i] == BYTES)
                        break;
                }
                clock_gettime(CLOCK_MONOTONIC, &end);
                double s = (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) * 1e-9;
                if (s < best_s)
                    best_s = s;
            }
            double bytes = part_sizes[i] == BYTES ? BYTES : (double)(BYTES / part_sizes[i] / 4) * (double)part_sizes[i];
            printf("%-12s %9zu bytes: %6.2f GB/s (%08x)\n", way_names[way], part_sizes[i], bytes / best_s * 1e-9, crc);
        }
    free(data);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "bench") == 0) {
        bench();
        return 0;
    }
    RUN(published_vectors);
    RUN(all_ways_agree);
    RUN(parts_add_up);
    RUN(copies_are_checked_as_they_are_made);
    RUN(every_flipped_bit_shows);
    return check_summary();
}
