#include "crc32c.h"

#include "base.h"
#include "folding.h"

#include <pthread.h>
#include <string.h>

#define POLYNOMIAL 0x82f63b78u /* bits reflected: bit 31 is x^0 */

/* What follows works on the register, which is the complement of the checksum. */
typedef uint32_t register_function(uint32_t r, const uint8_t *at, size_t bytes);

static pthread_once_t once = PTHREAD_ONCE_INIT;
static uint32_t slices[8][256];
static register_function *ways[PCCL_CRC32C_WAY_COUNT];
static register_function *best;

static uint32_t by_tables(uint32_t r, const uint8_t *at, size_t bytes)
{
    for (; bytes >= 8; at += 8, bytes -= 8) {
        uint32_t low = pccl_get_u32(at) ^ r;
        uint32_t high = pccl_get_u32(at + 4);
        r = slices[7][low & 255] ^ slices[6][low >> 8 & 255] ^ slices[5][low >> 16 & 255] ^ slices[4][low >> 24] ^
            slices[3][high & 255] ^ slices[2][high >> 8 & 255] ^ slices[1][high >> 16 & 255] ^ slices[0][high >> 24];
    }
    for (; bytes > 0; at++, bytes--)
        r = r >> 8 ^ slices[0][(r ^ *at) & 255];
    return r;
}

#if PCCL_SIMD_X86
#define HAVE_INSTRUCTION 1
#define TARGET_INSTRUCTION __attribute__((target(PCCL_TARGET_CRC32C)))
#define INSTRUCTION_8(r, v) ((uint32_t)__builtin_ia32_crc32di((r), (v)))
#define INSTRUCTION_1(r, v) __builtin_ia32_crc32qi((r), (v))
#elif defined(__aarch64__) && defined(__GNUC__) && !defined(PCCL_NO_SIMD)
#define HAVE_INSTRUCTION 1
#if defined(__clang__)
#define TARGET_INSTRUCTION __attribute__((target("crc")))
#define INSTRUCTION_8(r, v) __builtin_arm_crc32cd((r), (v))
#define INSTRUCTION_1(r, v) __builtin_arm_crc32cb((r), (v))
#else
#define TARGET_INSTRUCTION __attribute__((target("+crc")))
#define INSTRUCTION_8(r, v) __builtin_aarch64_crc32cx((r), (v))
#define INSTRUCTION_1(r, v) __builtin_aarch64_crc32cb((r), (v))
#endif
#else
#define HAVE_INSTRUCTION 0
#endif

#if HAVE_INSTRUCTION
enum { LONG_BYTES = 4096, SHORT_BYTES = 256, SHIFT_COUNT = 2 };

static uint32_t shifts[SHIFT_COUNT][4][256]; /* by LONG_BYTES and SHORT_BYTES of zeros */

/* a b mod P */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
        if (a & bit)
            product ^= b;
        b = b & 1 ? b >> 1 ^ POLYNOMIAL : b >> 1;
    }
    return product;
}

/* x^n mod P */
static uint32_t power(uint64_t n)
{
    uint32_t result = 1u << 31;
    uint32_t square = 1u << 30;
    for (; n != 0; n >>= 1) {
        if (n & 1)
            result = multiply(result, square);
        square = multiply(square, square);
    }
    return result;
}

static uint32_t shift(uint32_t (*table)[256], uint32_t r)
{
    return table[0][r & 255] ^ table[1][r >> 8 & 255] ^ table[2][r >> 16 & 255] ^ table[3][r >> 24];
}

static inline uint64_t load_8(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value; /* the CPUs meant here are little-endian */
}

/* Three neighbouring parts at once, then put together. */
TARGET_INSTRUCTION
static uint32_t three(uint32_t r, const uint8_t *at, size_t piece_bytes, uint32_t (*table)[256])
{
    uint32_t second = 0;
    uint32_t third = 0;
    for (const uint8_t *end = at + piece_bytes; at < end; at += 8) {
        r = INSTRUCTION_8(r, load_8(at));
        second = INSTRUCTION_8(second, load_8(at + piece_bytes));
        third = INSTRUCTION_8(third, load_8(at + 2 * piece_bytes));
    }
    return shift(table, shift(table, r) ^ second) ^ third;
}

TARGET_INSTRUCTION
static uint32_t by_instruction(uint32_t r, const uint8_t *at, size_t bytes)
{
    for (; bytes >= 3 * LONG_BYTES; at += 3 * LONG_BYTES, bytes -= 3 * LONG_BYTES)
        r = three(r, at, LONG_BYTES, shifts[0]);
    for (; bytes >= 3 * SHORT_BYTES; at += 3 * SHORT_BYTES, bytes -= 3 * SHORT_BYTES)
        r = three(r, at, SHORT_BYTES, shifts[1]);
    for (; bytes >= 8; at += 8, bytes -= 8)
        r = INSTRUCTION_8(r, load_8(at));
    for (; bytes > 0; at++, bytes--)
        r = INSTRUCTION_1(r, *at);
    return r;
}
#endif

#if PCCL_SIMD_X86
uint64_t pccl_fold_by_block[2];
uint64_t pccl_fold_by_lane[2];

static void fold_factors(uint64_t factors[2], unsigned bytes)
{
    factors[0] = power(8 * bytes + 31u);
    factors[1] = power(8 * bytes - 33u);
}

PCCL_TARGET_FOLDING
static uint32_t by_folding(uint32_t r, const uint8_t *at, size_t bytes)
{
    pccl_folding folding;
    if (bytes < PCCL_FOLD_BYTES)
        return by_instruction(r, at, bytes);
    pccl_fold_begin(&folding, r);
    for (; bytes >= PCCL_FOLD_BYTES; at += PCCL_FOLD_BYTES, bytes -= PCCL_FOLD_BYTES)
        for (int i = 0; i < PCCL_FOLD_LANES; i++)
            pccl_fold_lane(&folding, i, pccl_fold_load(at + i * PCCL_FOLD_LANE_BYTES));
    return by_instruction(pccl_fold_end(&folding), at, bytes);
}

/* `to` is aligned to a lane. */
PCCL_TARGET_FOLDING
static uint32_t copy_by_folding(uint32_t r, uint8_t *to, const uint8_t *from, size_t bytes)
{
    pccl_folding folding;
    if (bytes >= PCCL_FOLD_BYTES) {
        pccl_fold_begin(&folding, r);
        for (; bytes >= PCCL_FOLD_BYTES; to += PCCL_FOLD_BYTES, from += PCCL_FOLD_BYTES, bytes -= PCCL_FOLD_BYTES)
            for (int i = 0; i < PCCL_FOLD_LANES; i++) {
                __m512i lane = pccl_fold_load(from + i * PCCL_FOLD_LANE_BYTES);
                _mm512_stream_si512((void *)(to + i * PCCL_FOLD_LANE_BYTES), lane);
                pccl_fold_lane(&folding, i, lane);
            }
        _mm_sfence();
        r = pccl_fold_end(&folding);
    }
    memcpy(to, from, bytes);
    return by_instruction(r, from, bytes);
}
#endif

static void prepare(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t r = i;
        for (int bit = 0; bit < 8; bit++)
            r = r & 1 ? r >> 1 ^ POLYNOMIAL : r >> 1;
        slices[0][i] = r;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++)
            slices[k][i] = slices[k - 1][i] >> 8 ^ slices[0][slices[k - 1][i] & 255];
    ways[PCCL_CRC32C_TABLES] = best = by_tables;

#if HAVE_INSTRUCTION
    static const uint32_t shift_bytes[SHIFT_COUNT] = {LONG_BYTES, SHORT_BYTES};
    for (int s = 0; s < SHIFT_COUNT; s++) {
        uint32_t factor = power(8u * shift_bytes[s]);
        for (int k = 0; k < 4; k++)
            for (uint32_t i = 0; i < 256; i++)
                shifts[s][k][i] = multiply(i << 8 * k, factor);
    }
    if (pccl_simd_has(PCCL_SIMD_CRC32C))
        ways[PCCL_CRC32C_INSTRUCTION] = best = by_instruction;
#endif
#if PCCL_SIMD_X86
    fold_factors(pccl_fold_by_block, PCCL_FOLD_BYTES);
    fold_factors(pccl_fold_by_lane, PCCL_FOLD_LANE_BYTES);
    if (pccl_simd_has(PCCL_SIMD_CRC32C) && pccl_simd_has(PCCL_SIMD_VPCLMULQDQ_512))
        ways[PCCL_CRC32C_FOLDING] = best = by_folding;
#endif
}

uint32_t pccl_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    pthread_once(&once, prepare);
    return ~best(~crc, data, bytes);
}

uint32_t pccl_crc32c_copy(uint32_t crc, void *to, const void *from, size_t bytes)
{
    pthread_once(&once, prepare);
#if PCCL_SIMD_X86
    if (ways[PCCL_CRC32C_FOLDING] != NULL) {
        size_t head = pccl_min_size(-(uintptr_t)to % PCCL_FOLD_LANE_BYTES, bytes);
        memcpy(to, from, head);
        uint32_t r = by_instruction(~crc, from, head);
        return ~copy_by_folding(r, (uint8_t *)to + head, (const uint8_t *)from + head, bytes - head);
    }
#endif
    enum { PIECE_BYTES = 16 << 10 };
    uint8_t *destination = to;
    const uint8_t *source = from;
    for (size_t done = 0; done < bytes; done += PIECE_BYTES) {
        size_t piece_bytes = pccl_min_size(PIECE_BYTES, bytes - done);
        memcpy(destination + done, source + done, piece_bytes);
        crc = pccl_crc32c(crc, source + done, piece_bytes);
    }
    return crc;
}

int pccl_crc32c_has(enum pccl_crc32c_way way)
{
    pthread_once(&once, prepare);
    return ways[way] != NULL;
}

uint32_t pccl_crc32c_by(enum pccl_crc32c_way way, uint32_t crc, const void *data, size_t bytes)
{
    PCCL_ASSERT(pccl_crc32c_has(way));
    return ~ways[way](~crc, data, bytes);
}
