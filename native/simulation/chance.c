/* chance.c: random numbers of a seed (splitmix64), and memory for the drivers of the simulation. */
#include "sim.h"

#include <stdlib.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

static uint64_t state;
static int is_at_work;

void sim_seed(uint64_t seed, int is_random)
{
    state = seed;
    is_at_work = is_random;
}

int sim_is_random(void) { return is_at_work; }

uint32_t sim_draw(uint32_t below)
{
    if (!is_at_work || below <= 1)
        return 0;
    uint64_t z = (state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (uint32_t)((z ^ (z >> 31)) % below);
}

int sim_happens(uint32_t one_in) { return is_at_work && sim_draw(one_in) == 0; }

void *pccl_sim_allocate(size_t bytes) { return malloc(pccl_max_size(bytes, 1)); }

void pccl_sim_free(void *memory) { free(memory); }

void pccl_sim_forbid(void *memory, size_t bytes, int is_forbidden)
{
#if defined(__SANITIZE_ADDRESS__)
    if (is_forbidden)
        __asan_poison_memory_region(memory, bytes);
    else
        __asan_unpoison_memory_region(memory, bytes);
#else
    (void)memory;
    (void)bytes;
    (void)is_forbidden;
#endif
}

int pccl_sim_is_sanitized(void)
{
#if defined(__SANITIZE_ADDRESS__)
    return 1;
#else
    return 0;
#endif
}
