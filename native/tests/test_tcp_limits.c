/* What the system tells of a connection: segments that were sent again in vain do not count as lost. */
#include "check.h"
#include "../src/wire.h"

static void test_what_was_sent_again_in_vain_was_not_lost(void)
{
    CHECK(pccl_tcp_resent(0, 5, 0) == 5);
    CHECK(pccl_tcp_resent(0, 5, 2) == 3);
    CHECK(pccl_tcp_resent(0, 5, 5) == 0);
    CHECK(pccl_tcp_resent(0, 5, 7) == 0); /* the receiver may have got one of them three times */
}

/* A process that is stopped again and again: each time one segment is sent again, and a round trip later it turns out
 * that it had come. */
static void test_the_count_never_falls(void)
{
    uint32_t known = 0;
    for (uint32_t stop = 1; stop <= 100; stop++) {
        uint32_t before = known;
        known = pccl_tcp_resent(known, stop, stop - 1);
        CHECK(known >= before);
        known = pccl_tcp_resent(known, stop, stop);
        CHECK(known >= before);
    }
    CHECK(known == 1);
}

int main(void)
{
    RUN(test_what_was_sent_again_in_vain_was_not_lost);
    RUN(test_the_count_never_falls);
    return check_summary();
}
