/* The direct plan: the order of folding and of serving, beside lists of ranks. */
#include "check.h"
#include "plans.h"

#include "pccl_native.h"

enum { WORLD_TESTED_MAX = 12 };

/* With the own share put in where plans.h says, all ranks are folded in their order. */
static void turns_go_through_the_ranks(void)
{
    for (uint32_t world = 2; world <= WORLD_TESTED_MAX; world++)
        for (uint32_t owner = 0; owner < world; owner++) {
            uint32_t expected = 0;
            uint32_t turns = 0;
            if (owner == 0)
                expected++;
            for (uint32_t turn = pccl_direct_first_turn(owner); turn != world;
                turn = pccl_direct_next_turn(owner, turn)) {
                CHECK(turn == expected);
                expected++;
                turns++;
                if (expected == owner)
                    expected++;
                REQUIRE(turns < world);
            }
            CHECK(turns == world - 1 && expected == world);
        }
}

static void slots_are_disjoint_in(uint32_t world, uint32_t owner, int is_quantized)
{
    int used[WORLD_TESTED_MAX] = {0};
    uint32_t count = 0;
    for (uint32_t rank = 0; rank < world; rank++) {
        if (rank == owner || (rank == pccl_direct_first_turn(owner) && !is_quantized))
            continue;
        uint32_t slot = pccl_direct_waiting_slot(owner, rank, is_quantized);
        REQUIRE(slot < pccl_direct_waiting_slots(world, is_quantized));
        CHECK(used[slot]++ == 0);
        count++;
    }
    CHECK(count == pccl_direct_waiting_slots(world, is_quantized));
}

/* Every share has a waiting slot of its own, but that of the first turn only if it is quantized. With two ranks there
 * is no other, and none waits. */
static void slots_are_disjoint(void)
{
    for (uint32_t world = 2; world <= WORLD_TESTED_MAX; world++)
        for (uint32_t owner = 0; owner < world; owner++) {
            slots_are_disjoint_in(world, owner, 0);
            if (world > 2)
                slots_are_disjoint_in(world, owner, 1);
        }
    CHECK(pccl_direct_waiting_slots(2, 0) == 0 && pccl_direct_waiting_slots(2, 1) == 0);
}

/* Each rank serves every other once, and no two the same one at the same time. */
static void serving_is_spread(void)
{
    for (uint32_t world = 2; world <= WORLD_TESTED_MAX; world++)
        for (uint32_t i = 0; i + 1 < world; i++) {
            int at_once[WORLD_TESTED_MAX] = {0};
            for (uint32_t rank = 0; rank < world; rank++) {
                uint32_t served = pccl_direct_served(world, rank, i);
                REQUIRE(served < world);
                CHECK(served != rank && at_once[served]++ == 0);
                for (uint32_t k = 0; k < i; k++)
                    CHECK(pccl_direct_served(world, rank, k) != served);
            }
        }
}

static void small_and_quantized_ops_go_direct(void)
{
    CHECK(pccl_algorithm_default(1000, PCCL_FLOAT32, PCCL_QUANT_NONE, 4) == PCCL_DIRECT);
    CHECK(pccl_algorithm_default(0, PCCL_FLOAT32, PCCL_QUANT_NONE, 4) == PCCL_DIRECT);
    CHECK(pccl_algorithm_default(UINT64_C(1) << 30, PCCL_FLOAT32, PCCL_QUANT_NONE, 4) == PCCL_RING);
    CHECK(pccl_algorithm_default(UINT64_MAX, PCCL_FLOAT64, PCCL_QUANT_NONE, 4) == PCCL_RING);
    CHECK(pccl_algorithm_default(UINT64_C(1) << 24, PCCL_FLOAT32, PCCL_QUANT_MIN_MAX, 4) == PCCL_DIRECT);
    CHECK(pccl_algorithm_default(1000, PCCL_FLOAT32, PCCL_QUANT_NONE, 1) == PCCL_RING);
    CHECK(pccl_algorithm_default(1000, PCCL_DTYPE_COUNT, PCCL_QUANT_NONE, 4) == PCCL_RING);
    for (uint32_t world = 0; world < 100; world++)
        for (uint64_t count = 0; count < UINT64_C(1) << 40; count = count * 3 + 1)
            for (uint32_t dtype = 0; dtype < PCCL_DTYPE_COUNT; dtype++)
                CHECK(pccl_algorithm_default(count, dtype, PCCL_QUANT_NONE, world) < PCCL_ALGORITHM_COUNT);
}

int main(void)
{
    RUN(turns_go_through_the_ranks);
    RUN(slots_are_disjoint);
    RUN(serving_is_spread);
    RUN(small_and_quantized_ops_go_direct);
    return check_summary();
}
