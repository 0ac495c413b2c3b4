#include "simd.h"

#if PCCL_SIMD_X86
#include <cpuid.h>
#endif

#if PCCL_SIMD_X86
/* By hand: __builtin_cpu_supports needs a runtime library that not every toolchain links, and not every
 * compiler's knows F16C. */
static int have_avx2_and_f16c(void)
{
    enum { XMM_AND_YMM = 6 };
    unsigned eax, ebx, ecx, edx, xcr0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE) || !(ecx & bit_F16C))
        return 0;
    /* Whether the system saves the wide registers on a context switch. */
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(edx) : "c"(0));
    if ((xcr0 & XMM_AND_YMM) != XMM_AND_YMM)
        return 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_AVX2);
}
#endif

static int detect(void)
{
#if PCCL_SIMD_X86
    if (have_avx2_and_f16c())
        return PCCL_SIMD_AVX2;
#endif
    return PCCL_SIMD_PORTABLE;
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
