/* fpenv.c: the registers that C99's <fenv.h> does not reach all of: subnormals are not among them. */
#include "fpenv.h"

#if defined(__SSE2__)

#include <xmmintrin.h>

/* MXCSR: flags of exceptions in the lowest six bits, then DAZ, a mask for each exception, two bits of rounding, FTZ. */
enum { FLAGS = 0x003f, DEFAULT = 0x1f80 };

static uint64_t get_register(void) { return _mm_getcsr(); }
static void set_register(uint64_t value) { _mm_setcsr((unsigned)value); }

#elif defined(__aarch64__)

/* FPCR: all zero is the default. Flags of exceptions have a register of their own. */
enum { FLAGS = 0, DEFAULT = 0 };

static uint64_t get_register(void)
{
    uint64_t value;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(value) : : "memory");
    return value;
}

static void set_register(uint64_t value) { __asm__ __volatile__("msr fpcr, %0" : : "r"(value) : "memory"); }

#else

#include <fenv.h>

/* The rounding mode is all there is to say in portable C. */
enum { FLAGS = 0, DEFAULT = FE_TONEAREST };

static uint64_t get_register(void) { return (uint64_t)fegetround(); }
static void set_register(uint64_t value) { (void)fesetround((int)value); }

#endif

uint64_t pccl_fpenv_get(void) { return get_register() & ~(uint64_t)FLAGS; }

/* Flags stay: arithmetic raises them in any environment. */
void pccl_fpenv_set(uint64_t environment) { set_register(environment | (get_register() & FLAGS)); }

uint64_t pccl_fpenv_default(void) { return DEFAULT; }

uint64_t pccl_fpenv_enter(void)
{
    const uint64_t before = pccl_fpenv_get();
    if (before != DEFAULT)
        pccl_fpenv_set(DEFAULT);
    return before;
}

void pccl_fpenv_leave(uint64_t before)
{
    if (before != DEFAULT)
        pccl_fpenv_set(before);
}
