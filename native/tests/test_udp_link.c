/* Links with a connection over UDP. */
#include "trial.h"

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#if defined(__linux__)

static int has_wrong_secret; /* at one end of the connections made from here on */

static void pair_udp(int fds[2])
{
    struct sockaddr_in addresses[2];
    memset(addresses, 0, sizeof addresses);
    for (int i = 0; i < 2; i++) {
        socklen_t bytes = sizeof addresses[i];
        fds[i] = socket(AF_INET, SOCK_DGRAM, 0);
        addresses[i].sin_family = AF_INET;
        addresses[i].sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (fds[i] < 0 || bind(fds[i], (struct sockaddr *)&addresses[i], sizeof addresses[i]) != 0 ||
            getsockname(fds[i], (struct sockaddr *)&addresses[i], &bytes) != 0)
            stop_test("bind");
    }
    for (int i = 0; i < 2; i++)
        if (connect(fds[i], (struct sockaddr *)&addresses[1 - i], sizeof addresses[i]) != 0)
            stop_test("connect");
}

static void world_add_udp(world *w, uint32_t a, uint32_t b, const int fds[2])
{
    static uint8_t secret[PCCL_UDP_SECRET_BYTES] = "thirty-two bytes that two share";
    key_pair keys;
    key_pair_make(&keys);
    for (int i = 0; i < 2; i++) {
        secret[0] ^= (uint8_t)has_wrong_secret;
        if (pccl_engine_link_add_udp(w->nodes[i == 0 ? a : b].engine, link_number(a, b), fds[i], secret, i,
                tested_encryption ? &keys.ends[i] : NULL) != 0)
            stop_test("link_add_udp");
    }
}

static void world_link_udp(world *w, uint32_t a, uint32_t b)
{
    int fds[2];
    pair_udp(fds);
    world_add_udp(w, a, b, fds);
}

static void world_open_udp(world *w, uint32_t size, unsigned tcp_connections)
{
    world_open(w, size, tcp_connections, 1, 0);
    for (uint32_t a = 0; a < size; a++)
        for (uint32_t b = a + 1; b < size; b++)
            world_link_udp(w, a, b);
}

static void run_ops(world *w, int ops)
{
    for (int op = 0; op < ops; op++) {
        tested_algorithm = op % 2 ? PCCL_DIRECT : PCCL_RING;
        uint32_t count = op % 3 == 0 ? 100 : 300000;
        pccl_op_shape shape = plain_shape(count, PCCL_FLOAT32, PCCL_SUM, 65536, w->size);
        trial_run(w, &shape, op % 2);
    }
    tested_algorithm = PCCL_RING;
}

static void check_no_link_lost(world *w)
{
    for (uint32_t rank = 0; rank < w->size; rank++)
        for (uint32_t other = 0; other < w->size; other++)
            CHECK(!node_has_event(&w->nodes[rank], PCCL_EVENT_LINK_LOST, link_number(rank, other)));
}

static void ops_run_over_udp(void)
{
    for (uint32_t size = 2; size <= 3; size++)
        for (tested_encryption = 0; tested_encryption < 2; tested_encryption++) {
            world w;
            world_open_udp(&w, size, 0);
            run_ops(&w, 8);
            check_no_link_lost(&w);
            world_close(&w);
        }
    tested_encryption = 0;
}

static void ops_run_over_udp_beside_tcp(void)
{
    world w;
    world_open_udp(&w, 3, 1);
    run_ops(&w, 8);
    check_no_link_lost(&w);
    world_close(&w);
}

static void ops_run_over_tcp_where_udp_is_blocked(void)
{
    world w;
    has_wrong_secret = 1;
    world_open_udp(&w, 2, 1);
    run_ops(&w, 4);
    /* After a second one end gives the connection up, then the other; the link lives on. */
    int given_up = 0;
    for (uint32_t rank = 0; rank < 2; rank++) {
        pccl_event lost = node_wait(&w.nodes[rank], PCCL_EVENT_CONNECTION_LOST, link_number(0, 1));
        given_up += strstr(lost.detail, "UDP does not get through") != NULL;
    }
    CHECK(given_up > 0);
    run_ops(&w, 4);
    check_no_link_lost(&w);
    world_close(&w);
    has_wrong_secret = 0;
}

/* What leaves the socket goes to another one from now on, and it gets nothing. */
static void cut(int fd, int sink)
{
    struct sockaddr_in address;
    socklen_t bytes = sizeof address;
    if (getsockname(sink, (struct sockaddr *)&address, &bytes) != 0 ||
        connect(fd, (struct sockaddr *)&address, bytes) != 0)
        stop_test("connect");
}

static void frames_on_a_path_that_dies_go_over_tcp(void)
{
    world w;
    pccl_engine_options options = tested_options();
    char error[128];
    world_init(&w, 2);
    for (uint32_t rank = 0; rank < 2; rank++) {
        memset(&w.nodes[rank], 0, sizeof w.nodes[rank]);
        w.nodes[rank].engine = pccl_engine_create(&options, error, sizeof error);
        if (w.nodes[rank].engine == NULL)
            stop_test(error);
    }
    world_link(&w, 0, 1, 1);
    int fds[2];
    int copies[2];
    int sinks[2];
    pair_udp(fds);
    pair_udp(sinks);
    for (int i = 0; i < 2; i++)
        copies[i] = dup(fds[i]);
    world_add_udp(&w, 0, 1, fds);
    run_ops(&w, 6);
    for (int i = 0; i < 2; i++)
        cut(copies[i], sinks[i]);
    run_ops(&w, 6);
    check_no_link_lost(&w);
    for (int i = 0; i < 2; i++) {
        close(copies[i]);
        close(sinks[i]);
    }
    world_close(&w);
}

static void a_peer_that_goes_ends_the_link(void)
{
    world w;
    world_open_udp(&w, 2, 0);
    run_ops(&w, 2);
    pccl_engine_destroy(w.nodes[0].engine);
    w.nodes[0].engine = NULL;
    pccl_event lost = node_wait(&w.nodes[1], PCCL_EVENT_LINK_LOST, link_number(0, 1));
    CHECK_MSG(strstr(lost.detail, "closed by the other side") != NULL, "'%s'", lost.detail);
    free(w.nodes[0].events);
    node_close(&w.nodes[1]);
}

/* A link of one connection of each kind, and copies of the stream's sockets. */
static void world_open_both(world *w, int copies[2])
{
    int fds[2];
    world_open(w, 2, 0, 1, 0);
    pair_tcp(fds);
    for (int i = 0; i < 2; i++)
        copies[i] = dup(fds[i]);
    world_add_connection(w, 0, fds[0], 1, fds[1]);
    world_link_udp(w, 0, 1);
}

static uint64_t segments_sent(int fd)
{
    struct tcp_info info;
    socklen_t bytes = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0)
        stop_test("TCP_INFO");
    return (uint64_t)info.tcpi_segs_out;
}

static void streams_carry_nothing_while_udp_works(void)
{
    enum { SEGMENTS_MAX = 40, TRIES = 50 }; /* acknowledgments */
    world w;
    int copies[2];
    world_open_both(&w, copies);
    int tries = 0;
    uint64_t more;
    do {
        uint64_t before = segments_sent(copies[0]);
        run_ops(&w, 6);
        more = segments_sent(copies[0]) - before;
    } while (more > SEGMENTS_MAX && ++tries < TRIES);
    CHECK(tries < TRIES);
    world_close(&w);
    for (int i = 0; i < 2; i++)
        close(copies[i]);
}

static void a_link_ends_with_its_last_stream(void)
{
    world w;
    int copies[2];
    world_open_both(&w, copies);
    run_ops(&w, 4);
    for (int i = 0; i < 2; i++)
        shutdown(copies[i], SHUT_RDWR);
    for (uint32_t rank = 0; rank < 2; rank++)
        (void)node_wait(&w.nodes[rank], PCCL_EVENT_LINK_LOST, link_number(0, 1));
    world_close(&w);
    for (int i = 0; i < 2; i++)
        close(copies[i]);
}

int main(void)
{
    RUN(streams_carry_nothing_while_udp_works);
    RUN(a_link_ends_with_its_last_stream);
    RUN(ops_run_over_udp);
    RUN(ops_run_over_udp_beside_tcp);
    RUN(ops_run_over_tcp_where_udp_is_blocked);
    RUN(frames_on_a_path_that_dies_go_over_tcp);
    RUN(a_peer_that_goes_ends_the_link);
    return check_summary();
}

#else

int main(void) { return 0; }

#endif
