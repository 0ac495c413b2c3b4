/* Peers that leave once they have committed an op: what they have said before that counts for those that are left, and
 * they say it before anybody here is told. Calls of the engine to sendmsg come through here (the Makefile's --wrap). */
#include "engine_wire.h"

#include <errno.h>

ssize_t __real_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);

/* Called instead of the next sendmsg. */
static ssize_t (*hook)(int fd, const struct msghdr *message, int flags);

ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
    ssize_t (*taken)(int, const struct msghdr *, int) = __atomic_exchange_n(&hook, NULL, __ATOMIC_SEQ_CST);
    return taken != NULL ? taken(fd, message, flags) : __real_sendmsg(fd, message, flags);
}

static void set_hook(ssize_t (*next)(int fd, const struct msghdr *message, int flags))
{
    __atomic_store_n(&hook, next, __ATOMIC_SEQ_CST);
}

static wire leaver;

static void submit_barrier(wire *w)
{
    w->request = wire_request(1, NULL, 0, SEGMENT_BYTES);
    w->request.shape.collective = PCCL_BARRIER;
    w->request.shape.reduce_op = 0;
    w->request.awaits_completion = 1;
    CHECK(pccl_engine_submit(w->n.engine, &w->request) == 0);
    CHECK(read_header(w->peer).type == PCCL_FRAME_READY);
}

/* The other end says its last word, and is gone when this end's last one comes. */
static ssize_t leave_and_reset(int fd, const struct msghdr *message, int flags)
{
    (void)fd;
    (void)message;
    (void)flags;
    pccl_frame done = op_frame(&leaver.request, PCCL_FRAME_DONE, 0);
    write_frame(leaver.peer, &done, NULL);
    shutdown(leaver.peer, SHUT_RDWR);
    errno = ECONNRESET;
    return -1;
}

static void what_came_before_sending_failed_counts(void)
{
    wire_open_bare(&leaver);
    submit_barrier(&leaver);
    set_hook(leave_and_reset);
    pccl_frame ready = op_frame(&leaver.request, PCCL_FRAME_READY, 0);
    write_frame(leaver.peer, &ready, NULL);
    pccl_event event;
    node_wait(&leaver.n, PCCL_EVENT_LINK_LOST, LINK);
    CHECK(node_take_collected(&leaver.n, PCCL_EVENT_OP_COMPLETED, 1, &event));
    wire_close(&leaver);
}

/* On one of several connections: the others go on, with what has to be sent again. */
static void sending_fails_on_one_of_two_connections(void)
{
    wire_open_bare(&leaver);
    submit_barrier(&leaver);
    int kept = wire_connect(&leaver);
    pccl_frame ready = op_frame(&leaver.request, PCCL_FRAME_READY, 0);
    set_hook(leave_and_reset);
    write_frame(kept, &ready, NULL);
    pccl_event event = node_wait(&leaver.n, PCCL_EVENT_CONNECTION_LOST, LINK);
    CHECK(node_take_collected(&leaver.n, PCCL_EVENT_OP_COMPLETED, 1, &event));
    CHECK(!node_take_collected(&leaver.n, PCCL_EVENT_LINK_LOST, LINK, &event));
    close(kept);
    wire_close(&leaver);
}

/* An error that no reading finds must not leave the connection as if it were whole. */
static ssize_t refuse(int fd, const struct msghdr *message, int flags)
{
    (void)fd;
    (void)message;
    (void)flags;
    errno = EPERM;
    return -1;
}

static void whoever_cannot_send_has_lost_the_connection(void)
{
    wire_open_bare(&leaver);
    submit_barrier(&leaver);
    set_hook(refuse);
    pccl_frame ready = op_frame(&leaver.request, PCCL_FRAME_READY, 0);
    write_frame(leaver.peer, &ready, NULL);
    expect_link_lost(&leaver.n, LINK, "send: ");
    wire_close(&leaver);
}

static int is_told_too_soon;

static ssize_t look_who_is_told(int fd, const struct msghdr *message, int flags)
{
    struct pollfd told = {.fd = pccl_engine_event_fd(leaver.n.engine), .events = POLLIN};
    is_told_too_soon = poll(&told, 1, 0) != 0;
    return __real_sendmsg(fd, message, flags);
}

/* Who is told that an op is over may end the process at once. */
static void the_others_are_told_first(void)
{
    wire_open_bare(&leaver);
    submit_barrier(&leaver);
    pccl_frame done = op_frame(&leaver.request, PCCL_FRAME_DONE, 0);
    pccl_frame ready = op_frame(&leaver.request, PCCL_FRAME_READY, 0);
    node_collect(&leaver.n);
    write_frame(leaver.peer, &done, NULL);
    set_hook(look_who_is_told);
    write_frame(leaver.peer, &ready, NULL);
    CHECK(read_header(leaver.peer).type == PCCL_FRAME_DONE);
    node_wait(&leaver.n, PCCL_EVENT_OP_COMPLETED, 1);
    CHECK(!is_told_too_soon);
    wire_close(&leaver);
}

/* Ops are stopped because a peer has left. Whoever has it from all that they are done may commit all the same. */
static void who_was_done_before_ops_stopped_hears_of_the_others(void)
{
    wire_open_bare(&leaver);
    submit_barrier(&leaver);
    pccl_frame ready = op_frame(&leaver.request, PCCL_FRAME_READY, 0);
    pccl_frame done = op_frame(&leaver.request, PCCL_FRAME_DONE, 0);
    write_frame(leaver.peer, &ready, NULL);
    CHECK(read_header(leaver.peer).type == PCCL_FRAME_DONE);
    CHECK(pccl_engine_freeze(leaver.n.engine, 0, 1) == 0);
    node_wait(&leaver.n, PCCL_EVENT_GROUP_FROZEN, 1);
    write_frame(leaver.peer, &done, NULL);
    node_wait(&leaver.n, PCCL_EVENT_OP_COMPLETED, 1);
    wire_close(&leaver);
}

int main(void)
{
    RUN(what_came_before_sending_failed_counts);
    RUN(sending_fails_on_one_of_two_connections);
    RUN(whoever_cannot_send_has_lost_the_connection);
    RUN(the_others_are_told_first);
    RUN(who_was_done_before_ops_stopped_hears_of_the_others);
    return check_summary();
}
