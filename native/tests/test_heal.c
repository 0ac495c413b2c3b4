/* What happens on the way between engines that are themselves well: damaged bytes. */
#include "check.h"
#include "proxy.h"

static uint32_t random_state = 2463534242u;

static uint32_t random_below(uint32_t bound)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 17;
    random_state ^= random_state << 5;
    return random_state % bound;
}

typedef struct {
    proxied p;
    pccl_op_shape shape;
    int in_place;
    size_t bytes;
    float *original[WORLD_RANKS_MAX];
    float *send[WORLD_RANKS_MAX];
    float *recv[WORLD_RANKS_MAX];
} trial;

enum { OP = 7 };

/* Small integers, so that every order of summing gives the same. */
static void trial_open(trial *t, uint32_t size, unsigned connections, int is_tcp, uint32_t count, int in_place)
{
    memset(t, 0, sizeof *t);
    proxied_open(&t->p, size, connections, is_tcp);
    t->shape = plain_shape(count, PCCL_FLOAT32, PCCL_SUM, 4096, size);
    t->in_place = in_place;
    t->bytes = count * sizeof(float);
    for (uint32_t rank = 0; rank < size; rank++) {
        t->original[rank] = malloc(t->bytes);
        t->send[rank] = malloc(t->bytes);
        t->recv[rank] = in_place ? t->send[rank] : malloc(t->bytes);
        if (t->original[rank] == NULL || t->send[rank] == NULL || t->recv[rank] == NULL)
            stop_test("memory");
        for (uint32_t i = 0; i < count; i++)
            t->original[rank][i] = (float)(random_below(2001) - 1000.0);
        memcpy(t->send[rank], t->original[rank], t->bytes);
    }
}

static void trial_submit(trial *t)
{
    for (uint32_t rank = 0; rank < t->p.w.size; rank++) {
        pccl_op_request request = request_for(&t->p.w, rank, OP, &t->shape);
        request.send = t->send[rank];
        request.recv = t->recv[rank];
        if (pccl_engine_submit(t->p.w.nodes[rank].engine, &request) != 0)
            stop_test("submit");
    }
}

static int trial_result_is_right(const trial *t, uint32_t rank)
{
    for (uint64_t i = 0; i < t->shape.count; i++) {
        float sum = 0;
        for (uint32_t k = 0; k < t->p.w.size; k++)
            sum += t->original[k][i];
        if (t->recv[rank][i] != sum)
            return 0;
    }
    return 1;
}

static void trial_close(trial *t)
{
    proxied_close(&t->p);
    for (uint32_t rank = 0; rank < t->shape.world_size; rank++) {
        free(t->original[rank]);
        if (!t->in_place)
            free(t->recv[rank]);
        free(t->send[rank]);
    }
}

static pump *trial_set_fault(trial *t, unsigned pump_at, enum fault fault, uint64_t at_byte)
{
    pump *p = &t->p.pumps[pump_at];
    p->fault = fault;
    p->at_byte = at_byte;
    p->bit = random_below(8);
    return p;
}

static int is_about_damage(const char *detail)
{
    return strstr(detail, "checksum") != NULL || strstr(detail, "not a pccl frame") != NULL ||
           strstr(detail, "unknown frame version") != NULL;
}

/* One bit anywhere in what an op needs: someone notices and never is done, whoever is done has the right
 * result, and an abort gives everyone the input back. */
static void a_flipped_bit_never_reaches_a_result(void)
{
    enum { COUNT = 9000 };
    for (int run = 0; run < 120; run++) {
        trial t;
        uint32_t size = 2 + (uint32_t)run % 2;
        trial_open(&t, size, 1, run / 4 % 2, COUNT, run / 2 % 2);
        /* With three ranks payload goes one way round: where it comes from, and less than all of it. */
        unsigned at = size == 2 ? random_below(2) : 2 * random_below(3);
        uint64_t op_bytes = 2 * (size - 1) * (t.bytes / size);
        pump *faulty = trial_set_fault(&t, at, FAULT_FLIP, random_below((uint32_t)op_bytes));
        proxied_start(&t.p);
        trial_submit(&t);
        uint32_t from = at / 2;
        uint64_t link = link_number(from, (from + 1) % size);
        node *receiver = &t.p.w.nodes[(from + (at % 2 ? 0 : 1)) % size];
        pccl_event event = node_wait(receiver, PCCL_EVENT_LINK_LOST, link);
        CHECK(faulty->is_faulty);
        CHECK_MSG(is_about_damage(event.detail), "'%s'", event.detail);
        node_collect(receiver);
        CHECK(!node_take_collected(receiver, PCCL_EVENT_OP_DONE, OP, &event));
        for (uint32_t rank = 0; rank < size; rank++) {
            node *n = &t.p.w.nodes[rank];
            node_collect(n);
            if (node_take_collected(n, PCCL_EVENT_OP_DONE, OP, &event))
                CHECK(trial_result_is_right(&t, rank));
            CHECK(pccl_engine_end(n->engine, OP, 0) == 0);
            node_wait(n, PCCL_EVENT_OP_ENDED, OP);
            CHECK(memcmp(t.send[rank], t.original[rank], t.bytes) == 0);
        }
        trial_close(&t);
    }
}

int main(void)
{
    RUN(a_flipped_bit_never_reaches_a_result);
    return check_summary();
}
