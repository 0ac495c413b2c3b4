/* wire_shm.c: shared memory between two processes of one host as a wire, with a socket that ends when the other process
 * does.
 *
 * The memory holds a ring for each direction. Its sender copies bytes into it and publishes how many it has written; its
 * receiver shows them in place and publishes how many it has consumed. Neither makes a system call while both are at
 * work:
 *
 *   1. A receiver that finds its ring empty sets `reader_sleeps` and looks again. A sender that has published looks at
 *      the flag after that, clears it and wakes the receiver. All four accesses are sequentially consistent, so one of
 *      the two sees what the other has written.
 *   2. A sender that finds its ring full does the same with `writer_waits`; it is woken when half of the ring is free.
 *   3. To be woken, each process polls a pipe of its own, into which the other one writes a byte. A full pipe is an
 *      unread wake-up.
 *
 * The other process is not trusted with this one's: a count is copied before it is checked, and one that is out of
 * bounds breaks the wire. The file is sealed, so the memory cannot be taken away. Bytes may still change while they are
 * read; conn_rx.c copies all that it acts upon, and elements that change are a wrong number, which a peer could have
 * sent as well.
 *
 * The memory and the pipes are opened through /proc/<pid>/fd, which the system permits between processes of one user
 * that see each other; the descriptors are this process's own then, and no flag that the other one sets applies to them.
 * Where that fails, the offer is refused, and the connection stays on TCP. */
#include "wire.h"

#include "base.h"
#include "list.h"
#include "wire_shm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__linux__) && defined(SYS_memfd_create) && defined(F_ADD_SEALS) && !defined(PCCL_SIMULATED)

enum {
    PIECE_BYTES = PCCL_RING_BYTES / 4, /* published, shown and given back at once */
    SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL,
    MEMFD_FLAGS = 3 /* MFD_CLOEXEC | MFD_ALLOW_SEALING */
};

#define MEMORY_NAME "pccl-wire"

struct pccl_memory {
    pccl_memory_header *at; /* NULL: not mapped */
    pid_t pid; /* a forked child has no copy of the memory */
    int is_maker;
    int memory_fd; /* -1: closed */
    int own_wake_fd;
    int peer_wake_fd;
};

/* Memory */

static void fd_close(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void pccl_memory_free(pccl_memory *memory)
{
    if (memory == NULL)
        return;
    if (memory->at != NULL && memory->pid == getpid())
        munmap(memory->at, PCCL_MEMORY_BYTES);
    fd_close(&memory->memory_fd);
    fd_close(&memory->own_wake_fd);
    fd_close(&memory->peer_wake_fd);
    free(memory);
}

static pccl_memory *memory_create(int is_maker)
{
    pccl_memory *memory = calloc(1, sizeof *memory);
    if (memory == NULL)
        return NULL;
    memory->pid = getpid();
    memory->is_maker = is_maker;
    memory->memory_fd = memory->own_wake_fd = memory->peer_wake_fd = -1;
    return memory;
}

/* 0, or -1 with errno set. */
static int memory_map(pccl_memory *memory)
{
    void *at = mmap(NULL, PCCL_MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, memory->memory_fd, 0);
    if (at == MAP_FAILED)
        return -1;
    memory->at = at;
    return madvise(at, PCCL_MEMORY_BYTES, MADV_DONTFORK);
}

/* Opens a descriptor of a process; what it is called has to begin with `name`. -1 with errno set. */
static int fd_open(uint32_t pid, uint32_t fd, const char *name, mode_t type, struct stat *status)
{
    char path[64];
    char target[64];
    snprintf(path, sizeof path, "/proc/%u/fd/%u", pid, fd);
    ssize_t n = readlink(path, target, sizeof target);
    size_t name_bytes = strlen(name);
    if (n < (ssize_t)name_bytes || memcmp(target, name, name_bytes) != 0) {
        errno = n < 0 ? errno : EINVAL;
        return -1;
    }
    int opened = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (opened < 0)
        return -1;
    if (fstat(opened, status) == 0 && (status->st_mode & S_IFMT) == type && status->st_uid == geteuid())
        return opened;
    close(opened);
    errno = EINVAL;
    return -1;
}

/* 0, or -1 where half of the descriptors are in use: the rest is for connections, which need one each instead of three. */
static int fds_look(const pccl_memory *memory)
{
    struct rlimit limit;
    int largest = memory->own_wake_fd > memory->peer_wake_fd ? memory->own_wake_fd : memory->peer_wake_fd;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || (rlim_t)largest < limit.rlim_cur / 2)
        return 0;
    errno = EMFILE;
    return -1;
}

/* Makes a pipe, and opens it for both reading and writing: so no write to it raises a signal. */
static int wake_create(void)
{
    int fds[2];
    struct stat status;
    if (pipe2(fds, O_NONBLOCK | O_CLOEXEC) != 0)
        return -1;
    int both = fd_open((uint32_t)getpid(), (uint32_t)fds[0], "pipe:", S_IFIFO, &status);
    int saved = errno;
    close(fds[0]);
    close(fds[1]);
    errno = saved;
    return both;
}

/* 0, or -1 with errno set. All pages are reserved here: without memory later, an access would end the process. */
static int memory_make(pccl_memory *memory)
{
    memory->memory_fd = (int)syscall(SYS_memfd_create, MEMORY_NAME, MEMFD_FLAGS);
    if (memory->memory_fd < 0 || fallocate(memory->memory_fd, 0, 0, PCCL_MEMORY_BYTES) != 0 ||
        fcntl(memory->memory_fd, F_ADD_SEALS, SEALS) != 0 || memory_map(memory) != 0 ||
        getentropy(memory->at->nonce, PCCL_MEMORY_NONCE_BYTES) != 0)
        return -1;
    memory->at->rings[0].reader_sleeps = memory->at->rings[1].reader_sleeps = 1;
    memory->own_wake_fd = wake_create();
    memory->peer_wake_fd = memory->own_wake_fd < 0 ? -1 : wake_create();
    return memory->peer_wake_fd < 0 ? -1 : fds_look(memory);
}

int pccl_memory_create(pccl_memory **made, uint8_t *offered)
{
    *made = NULL;
    pccl_memory *memory = memory_create(1);
    if (memory == NULL)
        return PCCL_E_MEMORY;
    if (memory_make(memory) != 0) {
        int saved = errno;
        pccl_memory_free(memory);
        errno = saved;
        return PCCL_E_SYSTEM;
    }
    pccl_memory_offer mine;
    mine.pid = (uint32_t)memory->pid;
    mine.memory_fd = (uint32_t)memory->memory_fd;
    mine.wake_fds[0] = (uint32_t)memory->own_wake_fd;
    mine.wake_fds[1] = (uint32_t)memory->peer_wake_fd;
    memcpy(mine.nonce, memory->at->nonce, PCCL_MEMORY_NONCE_BYTES);
    memcpy(offered, &mine, sizeof mine);
    *made = memory;
    return 0;
}

/* 0, or -1 with errno set. */
static int memory_find(pccl_memory *memory, const pccl_memory_offer *theirs)
{
    struct stat status;
    memory->memory_fd = fd_open(theirs->pid, theirs->memory_fd, "/memfd:" MEMORY_NAME, S_IFREG, &status);
    if (memory->memory_fd < 0)
        return -1;
    errno = EINVAL;
    int seals = fcntl(memory->memory_fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS || status.st_size != PCCL_MEMORY_BYTES || memory_map(memory) != 0)
        return -1;
    fd_close(&memory->memory_fd);
    errno = EINVAL;
    if (memcmp(memory->at->nonce, theirs->nonce, PCCL_MEMORY_NONCE_BYTES) != 0)
        return -1;
    memory->peer_wake_fd = fd_open(theirs->pid, theirs->wake_fds[0], "pipe:", S_IFIFO, &status);
    if (memory->peer_wake_fd >= 0)
        memory->own_wake_fd = fd_open(theirs->pid, theirs->wake_fds[1], "pipe:", S_IFIFO, &status);
    return memory->own_wake_fd < 0 ? -1 : fds_look(memory);
}

int pccl_memory_open(const uint8_t *offered, pccl_memory **made)
{
    *made = NULL;
    pccl_memory *memory = memory_create(0);
    if (memory == NULL)
        return PCCL_E_MEMORY;
    pccl_memory_offer theirs;
    memcpy(&theirs, offered, sizeof theirs);
    if (memory_find(memory, &theirs) != 0) {
        int saved = errno;
        pccl_memory_free(memory);
        errno = saved;
        return PCCL_E_SYSTEM;
    }
    *made = memory;
    return 0;
}

/* The wire */

typedef struct {
    pccl_wire wire;
    pccl_fd_registry *fds;
    pccl_poller *poller; /* NULL: not watched */
    pccl_poll_entry socket;
    pccl_poll_entry wake;
    pccl_memory *memory;
    pccl_ring *out;
    pccl_ring *in;
    uint8_t *out_bytes;
    const uint8_t *in_bytes;
    uint64_t written; /* of `out`, this process's own count, published or not */
    uint64_t out_consumed; /* as last seen */
    uint64_t consumed; /* of `in`, the same */
    uint64_t in_written;
    size_t shown; /* after `consumed` */
    uint8_t is_blocked; /* the last send has found the ring full */
    uint8_t has_ended; /* the socket: no more bytes are written */
    int error; /* of the socket then; 0: none */
} shm_wire;

static shm_wire *shm_of(pccl_wire *wire) { return PCCL_CONTAINER_OF(wire, shm_wire, wire); }

static int shm_watch(pccl_wire *wire, pccl_poller *poller, void *owner)
{
    shm_wire *shm = shm_of(wire);
    shm->socket.owner = shm->wake.owner = owner;
    if (pccl_poller_add(poller, &shm->wake, shm->wake.fd, PCCL_POLL_IN) != 0)
        return -1;
    if (pccl_poller_add(poller, &shm->socket, shm->socket.fd, PCCL_POLL_IN) != 0) {
        int saved = errno;
        pccl_poller_remove(poller, &shm->wake);
        errno = saved;
        return -1;
    }
    shm->poller = poller;
    return 0;
}

/* It is woken for both, and never without memory. */
static void shm_want(pccl_wire *wire, unsigned interest)
{
    (void)wire;
    (void)interest;
}

static void shm_close(pccl_wire *wire)
{
    shm_wire *shm = shm_of(wire);
    if (shm->poller != NULL) {
        pccl_poller_remove(shm->poller, &shm->socket);
        pccl_poller_remove(shm->poller, &shm->wake);
    }
    pccl_fd_registry_close(shm->fds, shm->socket.fd);
    pccl_fd_registry_close(shm->fds, shm->memory->own_wake_fd);
    pccl_fd_registry_close(shm->fds, shm->memory->peer_wake_fd);
    shm->memory->own_wake_fd = shm->memory->peer_wake_fd = -1;
    pccl_memory_free(shm->memory);
    free(shm);
}

/* 0, or an errno: the descriptor is not there any more. */
static int wake_signal(int fd)
{
    ssize_t n;
    do
        n = write(fd, "", 1);
    while (n < 0 && errno == EINTR);
    return n < 0 && errno != EAGAIN ? errno : 0;
}

static ssize_t shm_break(shm_wire *shm)
{
    shm->wire.broken = "shared memory: a count that is out of bounds";
    return -EPROTO;
}

/* Reads what the other process has consumed of `out`: 0, or -1 if that cannot be. */
static int out_look(shm_wire *shm)
{
    uint64_t consumed = __atomic_load_n(&shm->out->consumed, __ATOMIC_SEQ_CST);
    if (consumed - shm->out_consumed > shm->written - shm->out_consumed)
        return -1;
    shm->out_consumed = consumed;
    return 0;
}

static size_t out_room(const shm_wire *shm) { return PCCL_RING_BYTES - (size_t)(shm->written - shm->out_consumed); }

/* Publishes what was written. 0, or an errno. */
static int out_publish(shm_wire *shm)
{
    __atomic_store_n(&shm->out->written, shm->written, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&shm->out->reader_sleeps, __ATOMIC_SEQ_CST) == 0 ||
        __atomic_exchange_n(&shm->out->reader_sleeps, 0, __ATOMIC_SEQ_CST) == 0)
        return 0;
    return wake_signal(shm->memory->peer_wake_fd);
}

/* All is published, and there is no room. 1: there is now; 0: a wake-up follows; or -1 as out_look. */
static int out_wait(shm_wire *shm)
{
    __atomic_store_n(&shm->out->writer_waits, 1, __ATOMIC_SEQ_CST);
    if (out_look(shm) != 0)
        return -1;
    if (out_room(shm) < PCCL_RING_BYTES / 2)
        return 0;
    __atomic_store_n(&shm->out->writer_waits, 0, __ATOMIC_SEQ_CST);
    return 1;
}

static ssize_t shm_send(pccl_wire *wire, struct iovec *iov, int count)
{
    shm_wire *shm = shm_of(wire);
    uint64_t begin = shm->written;
    uint64_t published = begin;
    int error = 0;
    size_t done = 0;
    shm->is_blocked = 0;
    if (out_look(shm) != 0)
        return shm_break(shm);
    while (count > 0 && error == 0) {
        size_t room = out_room(shm);
        if (room == 0) {
            error = published != shm->written ? out_publish(shm) : 0;
            published = shm->written;
            int has_room = out_wait(shm);
            if (has_room < 0)
                return shm_break(shm);
            shm->is_blocked = !has_room;
            if (shm->is_blocked)
                break;
            continue;
        }
        size_t at = (size_t)(shm->written % PCCL_RING_BYTES);
        size_t n = pccl_min_size(pccl_min_size(iov->iov_len - done, room), PCCL_RING_BYTES - at);
        n = pccl_min_size(n, PIECE_BYTES - (size_t)(shm->written - published));
        memcpy(shm->out_bytes + at, (const uint8_t *)iov->iov_base + done, n);
        shm->written += n;
        done += n;
        if (done == iov->iov_len) {
            iov++, count--;
            done = 0;
        }
        if (shm->written - published == PIECE_BYTES) {
            error = out_publish(shm);
            published = shm->written;
        }
    }
    if (published != shm->written && error == 0)
        error = out_publish(shm);
    wire->sent_bytes += shm->written - begin;
    return error != 0 ? -error : (ssize_t)(shm->written - begin);
}

/* Reads what the other process has written to `in`: 0, or -1 if that cannot be. */
static int in_look(shm_wire *shm)
{
    uint64_t written = __atomic_load_n(&shm->in->written, __ATOMIC_SEQ_CST);
    if (written - shm->consumed > PCCL_RING_BYTES || written - shm->consumed < shm->in_written - shm->consumed)
        return -1;
    shm->in_written = written;
    return 0;
}

/* Gives back what was shown. 0, or an errno. */
static int in_consume(shm_wire *shm)
{
    if (shm->shown == 0)
        return 0;
    shm->consumed += shm->shown;
    shm->shown = 0;
    __atomic_store_n(&shm->in->consumed, shm->consumed, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&shm->in->writer_waits, __ATOMIC_SEQ_CST) == 0)
        return 0;
    uint64_t written = __atomic_load_n(&shm->in->written, __ATOMIC_SEQ_CST);
    if (written - shm->consumed > PCCL_RING_BYTES / 2 ||
        __atomic_exchange_n(&shm->in->writer_waits, 0, __ATOMIC_SEQ_CST) == 0)
        return 0;
    return wake_signal(shm->memory->peer_wake_fd);
}

static ssize_t shm_view(pccl_wire *wire, const uint8_t **at, int may_read)
{
    shm_wire *shm = shm_of(wire);
    int error = in_consume(shm);
    int has_ended = shm->has_ended; /* before the ring is looked at: what it has then, it has for good */
    if (error == 0 && in_look(shm) != 0)
        return shm_break(shm);
    if (error == 0 && shm->in_written == shm->consumed) {
        if (has_ended)
            return -shm->error;
        __atomic_store_n(&shm->in->reader_sleeps, 1, __ATOMIC_SEQ_CST);
        if (in_look(shm) != 0)
            return shm_break(shm);
        if (shm->in_written == shm->consumed)
            return -EAGAIN;
        __atomic_store_n(&shm->in->reader_sleeps, 0, __ATOMIC_SEQ_CST);
    }
    if (error == 0 && !may_read)
        error = wake_signal(shm->memory->own_wake_fd);
    if (error != 0 || !may_read)
        return error != 0 ? -error : -EAGAIN;
    size_t begin = (size_t)(shm->consumed % PCCL_RING_BYTES);
    size_t bytes = pccl_min_size((size_t)(shm->in_written - shm->consumed), PCCL_RING_BYTES - begin);
    shm->shown = pccl_min_size(bytes, PIECE_BYTES);
    wire->received_bytes += shm->shown;
    *at = shm->in_bytes + begin;
    return (ssize_t)shm->shown;
}

/* Nothing comes on the socket but its end. */
static void socket_look(shm_wire *shm)
{
    uint8_t byte;
    ssize_t n;
    do
        n = recv(shm->socket.fd, &byte, 1, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return;
    shm->has_ended = 1;
    shm->error = n < 0 ? errno : 0;
    if (n > 0) {
        shm->wire.broken = "bytes beside the shared memory";
        shm->error = EPROTO;
    }
}

static unsigned shm_ready(pccl_wire *wire, const pccl_poll_event *event)
{
    shm_wire *shm = shm_of(wire);
    uint8_t bytes[64];
    if (event->entry == &shm->socket)
        socket_look(shm);
    else if (read(shm->wake.fd, bytes, sizeof bytes) > 0) /* before the rings are looked at */
        return PCCL_POLL_IN | PCCL_POLL_OUT;
    return PCCL_POLL_IN;
}

static void shm_bound_unsent(pccl_wire *wire, int bytes)
{
    (void)wire;
    (void)bytes;
}

/* What fits into the ring counts as what another system has acknowledged: the process there may stand still for a
 * while. */
static int shm_under_way(const pccl_wire *wire, uint64_t *in_flight_bytes, uint64_t *unsent_bytes)
{
    const shm_wire *shm = PCCL_CONTAINER_OF(wire, const shm_wire, wire);
    uint64_t unread_bytes = shm->written - __atomic_load_n(&shm->out->consumed, __ATOMIC_RELAXED);
    *in_flight_bytes = shm->is_blocked ? unread_bytes : 0;
    *unsent_bytes = 0;
    return 0;
}

static int shm_read_limits(const pccl_wire *wire, pccl_wire_limits *limits)
{
    (void)wire;
    (void)limits;
    return -1;
}

static const pccl_wire_type shm_type = {
    .watch = shm_watch,
    .want = shm_want,
    .ready = shm_ready,
    .close = shm_close,
    .send = shm_send,
    .view = shm_view,
    .bound_unsent = shm_bound_unsent,
    .under_way = shm_under_way,
    .read_limits = shm_read_limits,
};

/* All three or none: 0, or -1 where a number is too large. */
static int fds_register(pccl_fd_registry *fds, int fd, const pccl_memory *memory)
{
    int largest = fd > memory->own_wake_fd ? fd : memory->own_wake_fd;
    if (pccl_fd_registry_add(fds, largest > memory->peer_wake_fd ? largest : memory->peer_wake_fd) != 0)
        return -1;
    (void)pccl_fd_registry_add(fds, fd);
    (void)pccl_fd_registry_add(fds, memory->own_wake_fd);
    (void)pccl_fd_registry_add(fds, memory->peer_wake_fd);
    return 0;
}

int pccl_wire_shm_open(pccl_fd_registry *fds, int fd, pccl_memory *memory, pccl_wire **made)
{
    *made = NULL;
    shm_wire *shm = calloc(1, sizeof *shm);
    int flags = fcntl(fd, F_GETFD);
    if (shm == NULL || flags < 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0 || fds_register(fds, fd, memory) != 0) {
        int status = shm == NULL ? PCCL_E_MEMORY : flags < 0 ? PCCL_E_SYSTEM : PCCL_E_INVALID;
        close(fd);
        pccl_memory_free(memory);
        free(shm);
        return status;
    }
    fd_close(&memory->memory_fd);
    int sends = memory->is_maker ? 0 : 1;
    uint8_t *bytes = (uint8_t *)memory->at + PCCL_MEMORY_HEADER_BYTES;
    shm->wire.type = &shm_type;
    shm->wire.is_local = 1;
    shm->wire.is_authentic = 1;
    shm->fds = fds;
    shm->memory = memory;
    shm->socket.fd = fd;
    shm->wake.fd = memory->own_wake_fd;
    shm->out = &memory->at->rings[sends];
    shm->in = &memory->at->rings[1 - sends];
    shm->out_bytes = bytes + (size_t)sends * PCCL_RING_BYTES;
    shm->in_bytes = bytes + (size_t)(1 - sends) * PCCL_RING_BYTES;
    *made = &shm->wire;
    return 0;
}

#else

int pccl_memory_create(pccl_memory **made, uint8_t *offered)
{
    (void)offered;
    *made = NULL;
    errno = ENOSYS;
    return PCCL_E_SYSTEM;
}

int pccl_memory_open(const uint8_t *offered, pccl_memory **made)
{
    (void)offered;
    *made = NULL;
    errno = ENOSYS;
    return PCCL_E_SYSTEM;
}

void pccl_memory_free(pccl_memory *memory) { PCCL_ASSERT(memory == NULL); }

int pccl_wire_shm_open(pccl_fd_registry *fds, int fd, pccl_memory *memory, pccl_wire **made)
{
    (void)fds;
    (void)fd;
    PCCL_ASSERT(memory == NULL);
    *made = NULL;
    return PCCL_E_INVALID;
}

#endif
