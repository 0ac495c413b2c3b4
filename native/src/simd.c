#include "simd.h"

#if PCCL_SIMD_X86
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#if PCCL_SIMD_X86
/* Returns which wide registers the system saves on a context switch. Needs OSXSAVE. */
static unsigned saved_registers(void)
{
    unsigned edx, xcr0;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(edx) : "c"(0));
    return xcr0;
}

/* By hand: __builtin_cpu_supports needs a runtime library that not every toolchain links, and not every
 * compiler's knows F16C. */
static int detect(void)
{
    enum { XMM_AND_YMM = 0x6, AND_ZMM = 0xe6 };
    const unsigned avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE) || !(ecx & bit_F16C))
        return PCCL_SIMD_PORTABLE;
    const unsigned saved = saved_registers();
    if ((saved & XMM_AND_YMM) != XMM_AND_YMM)
        return PCCL_SIMD_PORTABLE;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(ebx & bit_AVX2))
        return PCCL_SIMD_PORTABLE;
    return (ebx & avx512) == avx512 && (saved & AND_ZMM) == AND_ZMM ? PCCL_SIMD_AVX512 : PCCL_SIMD_AVX2;
}
#else
static int detect(void) { return PCCL_SIMD_PORTABLE; }
#endif

int pccl_simd_has(enum pccl_simd_feature feature)
{
#if PCCL_SIMD_X86
    enum { LEAF_7_ECX_VPCLMULQDQ = 1 << 10 };
    unsigned eax, ebx, ecx, edx;
    if (feature == PCCL_SIMD_CRC32C)
        return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_SSE4_2);
    return detect() == PCCL_SIMD_AVX512 && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) &&
           (ecx & LEAF_7_ECX_VPCLMULQDQ);
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
    return feature == PCCL_SIMD_CRC32C; /* the compiler may use it anywhere */
#elif defined(__aarch64__) && defined(__linux__)
    enum { HWCAP_HAS_CRC32 = 1 << 7 };
    return feature == PCCL_SIMD_CRC32C && (getauxval(AT_HWCAP) & HWCAP_HAS_CRC32) != 0;
#else
    (void)feature;
    return 0;
#endif
}

/* -1 until first asked. Racing threads store the same value. */
static int current_level = -1;

int pccl_simd_level(void)
{
    int level = __atomic_load_n(&current_level, __ATOMIC_RELAXED);
    if (level < 0) {
        level = detect();
        __atomic_store_n(&current_level, level, __ATOMIC_RELAXED);
    }
    return level;
}

int pccl_simd_limit(int level_max)
{
    int level = detect();
    if (level > level_max)
        level = level_max;
    __atomic_store_n(&current_level, level, __ATOMIC_RELAXED);
    return level;
}
