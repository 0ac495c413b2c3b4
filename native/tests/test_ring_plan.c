/* The ring plan beside a naive simulation of the ring: tokens that walk from rank to rank. */
#include "check.h"
#include "plans.h"

#include <string.h>

static void hops_follow_the_ring(void)
{
    for (uint32_t world = 2; world <= 9; world++)
        for (uint32_t chunk = 0; chunk < world; chunk++) {
            pccl_ring_hops expected[9];
            memset(expected, 0xff, sizeof expected);
            for (uint32_t hop = 0; hop < 2 * (world - 1); hop++) {
                pccl_ring_hops *from = &expected[(chunk + 1 + hop) % world];
                pccl_ring_hops *to = &expected[(chunk + 2 + hop) % world];
                *(hop < world - 1 ? &from->send_partial : &from->send_final) = hop;
                *(hop < world - 1 ? &to->receive_partial : &to->receive_final) = hop;
            }
            for (uint32_t rank = 0; rank < world; rank++) {
                pccl_ring_hops hops = pccl_ring_hops_of(world, rank, chunk);
                CHECK(memcmp(&hops, &expected[rank], sizeof hops) == 0);
            }
        }
}

int main(void)
{
    RUN(hops_follow_the_ring);
    return check_summary();
}
