/* The cost of the flight recorder for one op: its entry and all milestones, in processor time.
 *
 *     make -C native build/plain-O3/bench_recorder OPTIMIZE=-O3 && native/build/plain-O3/bench_recorder
 *
 * "cold" is after something else has filled the caches, as between the ops of a program that computes. */
#include "recorder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RECORDS = 4096, OPS = 1000000, ROUNDS = 2000, OPS_PER_ROUND = 64, OTHER_BYTES = 4 << 20 };

static double cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void record_op(pccl_recorder *recorder, const pccl_op_request *request, int64_t now_ns)
{
    recorder->now_ns = now_ns;
    pccl_op_record *record = pccl_recorder_begin(recorder, request, now_ns, 7);
    for (int i = 0; i < 2; i++) {
        pccl_record_sent(record, now_ns);
        pccl_record_received(record, now_ns, 1);
    }
    pccl_record_heard(record, now_ns, 1);
    pccl_record_done(record, now_ns);
    pccl_record_completed(record, now_ns, 4096, 4096);
    pccl_recorder_end(recorder, record, 4096, 4096, 1);
}

int main(void)
{
    pccl_recorder recorder;
    pccl_op_request request;
    char *other = malloc(OTHER_BYTES);
    memset(&request, 0, sizeof request);
    request.shape.world_size = 2;
    if (other == NULL || pccl_recorder_init(&recorder, RECORDS) != 0)
        return 1;
    double begin = cpu_ns();
    for (int i = 0; i < OPS; i++)
        record_op(&recorder, &request, i + 1);
    double hot_ns = (cpu_ns() - begin) / OPS;
    double cold_ns = 0;
    for (int round = 0; round < ROUNDS; round++) {
        memset(other, round, OTHER_BYTES);
        begin = cpu_ns();
        for (int i = 0; i < OPS_PER_ROUND; i++)
            record_op(&recorder, &request, i + 1);
        cold_ns += cpu_ns() - begin;
    }
    printf("%.0f ns an op, cold %.0f ns\n", hot_ns, cold_ns / ROUNDS / OPS_PER_ROUND);
    pccl_recorder_free(&recorder);
    free(other);
    return 0;
}
