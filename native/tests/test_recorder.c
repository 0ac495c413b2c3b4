/* The flight recorder: which entries it keeps, and that an op's milestones are in order. */
#include "check.h"
#include "engine_world.h"
#include "recorder.h"
#include "os.h"

#include <pthread.h>
#include <sched.h>

enum { RECORDS = 8, COUNT = 96, SEGMENT_BYTES = 64 };

static pccl_op_request numbered(uint64_t op)
{
    pccl_op_request request;
    memset(&request, 0, sizeof request);
    request.op = op;
    request.key.sequence = op;
    request.shape.world_size = 2;
    return request;
}

static pccl_op_record *begin(pccl_recorder *recorder, uint64_t op)
{
    pccl_op_request request = numbered(op);
    return pccl_recorder_begin(recorder, &request, recorder->now_ns, 7);
}

static int has_op(const pccl_op_record *records, int count, uint64_t op)
{
    int found = 0;
    for (int i = 0; i < count; i++)
        found += records[i].op == op;
    return found;
}

static void test_the_last_ops_are_kept(void)
{
    pccl_recorder recorder;
    pccl_op_record read[2 * RECORDS];
    REQUIRE(pccl_recorder_init(&recorder, RECORDS) == 0);
    CHECK(pccl_recorder_read(&recorder, 0, read, RECORDS) == 0);
    for (uint64_t op = 1; op <= 3 * RECORDS; op++) {
        recorder.now_ns = (int64_t)op;
        pccl_recorder_end(&recorder, begin(&recorder, op), 10, 20, op % 2 == 0);
    }
    CHECK(pccl_recorder_read(&recorder, 0, read, 2 * RECORDS) == RECORDS);
    for (uint64_t op = 2 * RECORDS + 1; op <= 3 * RECORDS; op++)
        CHECK(has_op(read, RECORDS, op));
    for (int i = 0; i < RECORDS; i++) {
        CHECK(read[i].outcome == (read[i].op % 2 == 0 ? PCCL_RECORD_COMMITTED : PCCL_RECORD_ABORTED));
        CHECK(read[i].tx_bytes == 10 && read[i].rx_bytes == 20 && read[i].caller == 7);
        CHECK(read[i].launched_ns == (int64_t)read[i].op && read[i].ended_ns == read[i].launched_ns);
    }
    CHECK(pccl_recorder_read(&recorder, 3 * RECORDS - 2, read, 2 * RECORDS) == 2);
    CHECK(pccl_recorder_read(&recorder, 0, read, 3) == 3);
    pccl_recorder_free(&recorder);
}

static void test_an_open_op_is_kept_however_many_come_after_it(void)
{
    pccl_recorder recorder;
    pccl_op_record read[RECORDS];
    REQUIRE(pccl_recorder_init(&recorder, RECORDS) == 0);
    recorder.now_ns = 1;
    pccl_op_record *open = begin(&recorder, 1000);
    for (uint64_t op = 1; op <= 5 * RECORDS; op++)
        pccl_recorder_end(&recorder, begin(&recorder, op), 0, 0, 1);
    CHECK(pccl_recorder_read(&recorder, 1, read, RECORDS) == 1); /* the others ended then */
    CHECK(read[0].op == 1000 && read[0].outcome == PCCL_RECORD_OPEN);
    CHECK(pccl_recorder_read(&recorder, 0, read, RECORDS) == RECORDS);
    pccl_recorder_end(&recorder, open, 0, 0, 1);
    for (uint64_t op = 1; op < RECORDS + 1; op++)
        pccl_recorder_end(&recorder, begin(&recorder, op), 0, 0, 1);
    CHECK(pccl_recorder_read(&recorder, 0, read, RECORDS) == RECORDS);
    CHECK(!has_op(read, RECORDS, 1000));
    pccl_recorder_free(&recorder);
}

static void test_without_room_nothing_is_recorded(void)
{
    pccl_recorder recorder;
    REQUIRE(pccl_recorder_init(&recorder, 2) == 0);
    recorder.now_ns = 1;
    CHECK(begin(&recorder, 1) != NULL && begin(&recorder, 2) != NULL);
    CHECK(begin(&recorder, 3) == NULL);
    pccl_record_sent(NULL, 1);
    pccl_record_received(NULL, 1, 0);
    pccl_record_heard(NULL, 1, 0);
    pccl_recorder_end(&recorder, NULL, 0, 0, 1);
    pccl_recorder_free(&recorder);
    REQUIRE(pccl_recorder_init(&recorder, 0) == 0);
    CHECK(begin(&recorder, 1) == NULL);
    CHECK(pccl_recorder_read(&recorder, 0, NULL, 0) == 0);
    pccl_recorder_free(&recorder);
}

typedef struct {
    pccl_recorder recorder;
    int is_over;
} shared_recorder;

/* Every copy is of one op: its number is everywhere. */
static void *read_all(void *argument)
{
    shared_recorder *shared = argument;
    pccl_op_record read[RECORDS];
    while (!__atomic_load_n(&shared->is_over, __ATOMIC_ACQUIRE)) {
        int count = pccl_recorder_read(&shared->recorder, 0, read, RECORDS);
        for (int i = 0; i < count; i++) {
            CHECK(read[i].key.sequence == read[i].op && read[i].launched_ns == (int64_t)read[i].op);
            CHECK(read[i].done_ns == 0 || read[i].done_ns == (int64_t)read[i].op);
            CHECK(read[i].ended_ns == 0 || read[i].ended_ns == (int64_t)read[i].op);
        }
    }
    return NULL;
}

static void test_whoever_reads_meanwhile_gets_whole_records(void)
{
    shared_recorder shared;
    pthread_t thread;
    memset(&shared, 0, sizeof shared);
    REQUIRE(pccl_recorder_init(&shared.recorder, RECORDS) == 0);
    REQUIRE(pthread_create(&thread, NULL, read_all, &shared) == 0);
    for (uint64_t op = 1; op <= 100000; op++) {
        shared.recorder.now_ns = (int64_t)op;
        pccl_op_record *record = begin(&shared.recorder, op);
        pccl_record_sent(record, (int64_t)op);
        pccl_record_done(record, (int64_t)op);
        pccl_record_completed(record, (int64_t)op, op, op);
        pccl_recorder_end(&shared.recorder, record, op, op, 1);
    }
    __atomic_store_n(&shared.is_over, 1, __ATOMIC_RELEASE);
    pthread_join(thread, NULL);
    pccl_recorder_free(&shared.recorder);
}

static pccl_op_record record_of(node *n, uint64_t op)
{
    pccl_op_record read[64];
    pccl_op_record none;
    memset(&none, 0, sizeof none);
    int count = pccl_engine_read_records(n->engine, 0, read, 64);
    for (int i = 0; i < count; i++)
        if (read[i].op == op)
            return read[i];
    CHECK(!"no record of the op");
    return none;
}

static void check_ended(const pccl_op_record *record, const pccl_op_shape *shape, uint32_t rank)
{
    CHECK(record->outcome == PCCL_RECORD_COMMITTED);
    CHECK(record->rank == rank && record->world_size == shape->world_size && record->count == shape->count);
    CHECK(record->dtype == shape->dtype && record->algorithm == shape->algorithm);
    CHECK(record->tx_bytes > 0 && record->rx_bytes > 0);
    CHECK(record->heard_from != rank && record->heard_from < shape->world_size);
    CHECK(record->awaits == rank);
    CHECK(record->last_from != rank && record->last_from < shape->world_size);
    CHECK(0 < record->launched_ns);
    CHECK(record->launched_ns <= record->first_tx_ns && record->first_tx_ns <= record->last_tx_ns);
    CHECK(record->launched_ns <= record->first_rx_ns && record->first_rx_ns <= record->last_rx_ns);
    CHECK(record->launched_ns <= record->heard_ns && record->heard_ns <= record->done_ns);
    CHECK(record->last_rx_ns <= record->done_ns);
    CHECK(record->done_ns <= record->completed_ns && record->completed_ns <= record->ended_ns);
}

/* The last rank submits only when all others have: they have heard of it no sooner, and nobody is done before. */
static void run_ops(uint32_t size, uint8_t algorithm)
{
    world w;
    float values[WORLD_RANKS_MAX][COUNT] = {{0}};
    pccl_op_shape shape = plain_shape(COUNT, PCCL_FLOAT32, PCCL_SUM, SEGMENT_BYTES, size);
    shape.algorithm = algorithm;
    world_open(&w, size, 1, 1, 0);
    for (uint64_t op = 1; op < 20; op += 2) {
        int64_t launched_ns = 0;
        for (uint32_t rank = 0; rank < size; rank++) {
            pccl_op_request request = request_for(&w, rank, op, &shape);
            request.send = request.recv = values[rank];
            CHECK(pccl_engine_submit(w.nodes[rank].engine, &request) == 0);
        }
        for (uint32_t rank = 0; rank < size; rank++) {
            node_wait_done(&w.nodes[rank], op);
            CHECK(pccl_engine_end(w.nodes[rank].engine, op, PCCL_COMMIT) == 0);
            node_wait(&w.nodes[rank], PCCL_EVENT_OP_ENDED, op);
        }
        for (uint32_t rank = 0; rank < size; rank++) {
            pccl_op_record record = record_of(&w.nodes[rank], op);
            check_ended(&record, &shape, rank);
            if (record.launched_ns > launched_ns)
                launched_ns = record.launched_ns;
        }
        for (uint32_t rank = 0; rank < size; rank++)
            CHECK(record_of(&w.nodes[rank], op).completed_ns >= launched_ns);
    }
    world_close(&w);
}

static void test_milestones_of_direct_ops(void)
{
    run_ops(2, PCCL_DIRECT);
    run_ops(3, PCCL_DIRECT);
}

static void test_milestones_of_rings(void)
{
    run_ops(2, PCCL_RING);
    run_ops(4, PCCL_RING);
}

static void test_an_op_that_waits_can_be_read(void)
{
    world w;
    float values[COUNT] = {0};
    pccl_op_shape shape = plain_shape(COUNT, PCCL_FLOAT32, PCCL_SUM, SEGMENT_BYTES, 2);
    world_open(&w, 2, 1, 1, 0);
    pccl_op_request request = request_for(&w, 0, 1, &shape);
    request.send = request.recv = values;
    CHECK(pccl_engine_submit(w.nodes[0].engine, &request) == 0);
    CHECK(pccl_engine_freeze_op(w.nodes[0].engine, 1) == 0);
    node_wait(&w.nodes[0], PCCL_EVENT_OP_FROZEN, 1);
    pccl_op_record record = record_of(&w.nodes[0], 1);
    CHECK(record.outcome == PCCL_RECORD_OPEN && record.launched_ns > 0);
    CHECK(record.heard_ns == 0 && record.first_rx_ns == 0 && record.done_ns == 0 && record.ended_ns == 0);
    CHECK(pccl_engine_end(w.nodes[0].engine, 1, PCCL_ABORT) == 0);
    node_wait(&w.nodes[0], PCCL_EVENT_OP_ENDED, 1);
    record = record_of(&w.nodes[0], 1);
    CHECK(record.outcome == PCCL_RECORD_ABORTED && record.ended_ns >= record.launched_ns);
    world_close(&w);
}

static int has_heard(node *n)
{
    pccl_op_record read[64];
    int count = pccl_engine_read_records(n->engine, 0, read, 64);
    return count > 0 && read[0].heard_ns > 0;
}

/* Returns the rank that the only op awaits; UINT32_MAX: the engine has yet to take it in. */
static uint32_t awaited_by(node *n)
{
    pccl_op_record read[64];
    return pccl_engine_read_records(n->engine, 0, read, 64) > 0 ? read[0].awaits : UINT32_MAX;
}

/* Two of three ranks submit an op: each awaits the third one, whatever it hears of the other. */
static void check_whom_it_awaits(uint8_t algorithm)
{
    world w;
    float values[2][COUNT] = {{0}};
    pccl_op_shape shape = plain_shape(COUNT, PCCL_FLOAT32, PCCL_SUM, SEGMENT_BYTES, 3);
    shape.algorithm = algorithm;
    world_open(&w, 3, 1, 1, 0);
    for (uint32_t rank = 0; rank < 2; rank++) {
        pccl_op_request request = request_for(&w, rank, 1, &shape);
        request.send = request.recv = values[rank];
        CHECK(pccl_engine_submit(w.nodes[rank].engine, &request) == 0);
    }
    int64_t end_ns = pccl_now_ns() + 20 * (int64_t)1000000000;
    uint32_t hearing = algorithm == PCCL_RING ? 0 : 1; /* in a ring a rank hears from the next one */
    while (!has_heard(&w.nodes[hearing]) && pccl_now_ns() < end_ns)
        sched_yield();
    CHECK(has_heard(&w.nodes[hearing]));
    for (uint32_t rank = 0; rank < 2; rank++) {
        while (awaited_by(&w.nodes[rank]) != 2 && pccl_now_ns() < end_ns) /* it may hear of the other a moment later */
            sched_yield();
        CHECK(awaited_by(&w.nodes[rank]) == 2);
    }
    for (uint32_t rank = 0; rank < 2; rank++) {
        CHECK(pccl_engine_freeze_op(w.nodes[rank].engine, 1) == 0);
        node_wait(&w.nodes[rank], PCCL_EVENT_OP_FROZEN, 1);
        CHECK(pccl_engine_end(w.nodes[rank].engine, 1, PCCL_ABORT) == 0);
        node_wait(&w.nodes[rank], PCCL_EVENT_OP_ENDED, 1);
    }
    world_close(&w);
}

static void test_who_has_not_submitted_is_awaited(void)
{
    check_whom_it_awaits(PCCL_DIRECT);
    check_whom_it_awaits(PCCL_RING);
}

int main(void)
{
    RUN(test_the_last_ops_are_kept);
    RUN(test_an_open_op_is_kept_however_many_come_after_it);
    RUN(test_without_room_nothing_is_recorded);
    RUN(test_whoever_reads_meanwhile_gets_whole_records);
    RUN(test_milestones_of_direct_ops);
    RUN(test_milestones_of_rings);
    RUN(test_an_op_that_waits_can_be_read);
    RUN(test_who_has_not_submitted_is_awaited);
    return check_summary();
}
