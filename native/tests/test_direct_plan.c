/* The direct plan: the order of folding and of serving, beside lists of ranks. */
#include "check.h"
#include "plans.h"

#include "pccl_native.h"

#include <string.h>

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

static pccl_op_shape small_shape(uint64_t count, uint32_t dtype, uint32_t world)
{
    pccl_op_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.algorithm = PCCL_DIRECT;
    shape.count = count;
    shape.dtype = (uint8_t)dtype;
    shape.world_size = world;
    shape.segment_bytes = 1 << 20;
    return shape;
}

static void small_direct_all_reduces_are_oneshot(void)
{
    for (uint32_t world = 2; world <= WORLD_TESTED_MAX; world++)
        for (uint32_t dtype = 0; dtype < PCCL_DTYPE_COUNT; dtype++) {
            uint64_t fitting = PCCL_ONESHOT_BYTES_MAX / pccl_dtype_bytes(dtype) / (world - 1);
            pccl_op_shape shape = small_shape(fitting, dtype, world);
            CHECK(pccl_oneshot_is(&shape));
            shape.count = fitting + 1;
            CHECK(!pccl_oneshot_is(&shape));
            shape.count = 0; /* who owns nothing sends nothing */
            CHECK(!pccl_oneshot_is(&shape));
            shape.count = UINT64_MAX;
            CHECK(!pccl_oneshot_is(&shape));
        }
}

static void other_ops_are_not_oneshot(void)
{
    const pccl_op_shape small = small_shape(8, PCCL_FLOAT32, 3);
    pccl_op_shape shape = small;
    shape.segment_bytes = 32; /* just all of it */
    CHECK(pccl_oneshot_is(&shape));
    shape.segment_bytes = 31;
    CHECK(!pccl_oneshot_is(&shape));
    for (uint32_t collective = 0; collective < PCCL_COLLECTIVE_COUNT; collective++) {
        shape = small;
        shape.collective = (uint8_t)collective;
        CHECK(pccl_oneshot_is(&shape) == (collective == PCCL_ALL_REDUCE));
    }
    shape = small;
    shape.algorithm = PCCL_RING;
    CHECK(!pccl_oneshot_is(&shape));
    shape = small;
    shape.quantization = PCCL_QUANT_CAST;
    CHECK(!pccl_oneshot_is(&shape));
    shape = small;
    shape.last_slice = 1;
    CHECK(!pccl_oneshot_is(&shape));
    shape = small;
    shape.world_size = 1;
    CHECK(!pccl_oneshot_is(&shape));
}

int main(void)
{
    RUN(turns_go_through_the_ranks);
    RUN(slots_are_disjoint);
    RUN(serving_is_spread);
    RUN(small_and_quantized_ops_go_direct);
    RUN(small_direct_all_reduces_are_oneshot);
    RUN(other_ops_are_not_oneshot);
    return check_summary();
}
