/* base.h: what every native source may lean on. */
#ifndef PCCL_BASE_H
#define PCCL_BASE_H

#include <stddef.h>
#include <stdint.h>

/* Python builds extensions with -DNDEBUG, so <assert.h> is silent there. This one is not. It is for our own
 * mistakes: whatever a caller or a peer can cause is a returned status instead. */
#define PCCL_ASSERT(condition) ((condition) ? (void)0 : pccl_assert_failed(#condition, __FILE__, __LINE__, __func__))

#define PCCL_STATIC_ASSERT(condition, name) typedef char pccl_static_assert_##name[(condition) ? 1 : -1]

#define PCCL_COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

#if defined(__GNUC__)
#define PCCL_NORETURN __attribute__((noreturn))
#define PCCL_PRINTF(format_at, args_at) __attribute__((format(printf, format_at, args_at)))
#define PCCL_LIKELY(x) __builtin_expect(!!(x), 1)
#define PCCL_UNLIKELY(x) __builtin_expect(!!(x), 0)
#else
#define PCCL_NORETURN
#define PCCL_PRINTF(format_at, args_at)
#define PCCL_LIKELY(x) (x)
#define PCCL_UNLIKELY(x) (x)
#endif

/* The size of a window or buffer. The simulation has smaller ones, so that small arrays come to every path. */
#if defined(PCCL_SIMULATED)
#define PCCL_SIZE(shipped, simulated) (simulated)
#else
#define PCCL_SIZE(shipped, simulated) (shipped)
#endif

PCCL_NORETURN void pccl_assert_failed(const char *condition, const char *file, int line, const char *function);

static inline size_t pccl_min_size(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t pccl_max_size(size_t a, size_t b) { return a > b ? a : b; }
static inline uint32_t pccl_min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline uint32_t pccl_max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }
static inline uint64_t pccl_min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t pccl_max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }
static inline uint64_t pccl_div_up_u64(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }

/* Wire integers are little-endian and need not be aligned. */
static inline void pccl_put_u16(uint8_t *at, uint16_t v)
{
    at[0] = (uint8_t)v;
    at[1] = (uint8_t)(v >> 8);
}

static inline void pccl_put_u32(uint8_t *at, uint32_t v)
{
    at[0] = (uint8_t)v;
    at[1] = (uint8_t)(v >> 8);
    at[2] = (uint8_t)(v >> 16);
    at[3] = (uint8_t)(v >> 24);
}

static inline void pccl_put_u64(uint8_t *at, uint64_t v)
{
    pccl_put_u32(at, (uint32_t)v);
    pccl_put_u32(at + 4, (uint32_t)(v >> 32));
}

static inline uint16_t pccl_get_u16(const uint8_t *at) { return (uint16_t)((uint32_t)at[0] | (uint32_t)at[1] << 8); }

static inline uint32_t pccl_get_u32(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static inline uint64_t pccl_get_u64(const uint8_t *at)
{
    return (uint64_t)pccl_get_u32(at) | (uint64_t)pccl_get_u32(at + 4) << 32;
}

#endif
