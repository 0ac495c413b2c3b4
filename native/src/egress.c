#include "egress.h"

#include "thread.h"

#include <string.h>

enum {
    FAR_US = 2000, /* round trip */
    FIXED_ROUND_TRIP_US = 1000
};

void pccl_egress_init(pccl_egress *egress, uint64_t fixed_rate)
{
    memset(egress, 0, sizeof *egress);
    pccl_list_init(&egress->waiting);
    pccl_pacer_init(&egress->pacer, pccl_now_ns() / 1000);
    egress->is_fixed = egress->is_watched = fixed_rate != 0;
    if (fixed_rate != 0)
        pccl_pacer_limit(&egress->pacer, fixed_rate, FIXED_ROUND_TRIP_US);
}

int pccl_egress_carries(const pccl_egress *egress, int is_local, uint64_t round_trip_us)
{
    return (!is_local && round_trip_us >= FAR_US) || egress->is_fixed;
}

int pccl_egress_is_limiting(const pccl_egress *egress, int is_local, uint64_t round_trip_us)
{
    return pccl_pacer_is_limiting(&egress->pacer) && pccl_egress_carries(egress, is_local, round_trip_us);
}
