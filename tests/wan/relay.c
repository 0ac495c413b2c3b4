/* relay.c: a wide area network in user space. One TUN device in each host's network namespace, and between them
 * rates, delays, queues and losses.
 *
 * The way of a packet from host a to host b:
 *
 *     TUN of a -> uplink of a -> path a->b: loss, rate, delay -> downlink of b -> TUN of b
 *                 (a queue and a rate)      (its own queue)      (a queue and a rate)
 *
 * Theory of operation. Nothing is simulated in steps. A link is one number, the time at which it will have sent
 * everything it has accepted; a packet's departure follows from that number when the packet arrives, so a late wake-up
 * of this process delays a packet once and is not carried on to the next. Only two moments of a packet's life are
 * events, kept in one heap and waited for with one timer: its arrival at the downlink, where it competes with packets
 * of other hosts, and its delivery. Queues are drop-tail, and limited in bytes: a packet that finds more in front
 * of it is dropped. Losses are drawn after the uplink, so a lost packet has used it up; each path has its own
 * seeded generator, and so the n-th packet of a path is lost or not whatever the timing.
 *
 * What is counted are IP packets of at most the MTU, yet far fewer cross this process. With offloads, the kernel
 * hands over up to 64 KiB of TCP at once, to be cut into packets by the device (which is what a network card does),
 * and takes such trains back (which a network card's receiver does). A train is priced packet by packet through every
 * queue, rate and loss, is cut here only around packets that were dropped, and is delivered when its last
 * packet has arrived. That is what makes a gigabit each way affordable beside the hosts on two cores: measured there,
 * 19 % of a core for 942 Mbit/s of payload in each direction, where single packets took 95 % and did not keep up.
 *
 * Commands come on stdin, a line each, and are answered by one line on stdout, "ok ..." or "error ...":
 *
 *     host NAMESPACE                        attaches the next host, creates its device DEVICE; hosts count from 0
 *     address HOST A.B.C.D                  whose packets are for it
 *     uplink HOST BITS_PER_S QUEUE_BYTES    0 bits per second: unlimited
 *     downlink HOST BITS_PER_S QUEUE_BYTES
 *     path FROM TO DELAY_US LOSS BITS_PER_S QUEUE_BYTES SEED
 *     block FROM TO YES                     1: packets in that direction vanish, those under way included
 *     limit FROM TO BYTES                   packets of more in that direction vanish, as where the MTU of a path is
 *                                           smaller than the hosts believe and nobody tells them; 0: none does
 *     reorder FROM TO SHARE HELD_US         so many packets in that direction, by chance, come that much later, and so
 *                                           behind others; 0: none does
 *     stats                                 JSON
 *
 * The devices live as long as this process, which ends when stdin does. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum {
    HOSTS_MAX = 64,
    PACKET_BYTES_MAX = 65536,
    TRAIN_MAX = 1024, /* packets; the kernel makes at most 64 KiB / MSS */
    READS_PER_WAKE_MAX = 64, /* per device, so that deliveries are not kept waiting */
    LINE_BYTES_MAX = 512,
    LATE_NS = 1000000
};
#define DEVICE "wan0"
#define VNET_BYTES ((uint32_t)sizeof(struct virtio_net_hdr))
#define NEVER INT64_MAX

/* Time is in nanoseconds of CLOCK_MONOTONIC. */

typedef struct {
    double ns_per_byte; /* 0: infinitely fast */
    double queue_ns; /* how long the longest queue takes to drain */
    double free_ns; /* when all that was accepted will have been sent */
} rate_link;

typedef struct {
    rate_link link;
    double delay_ns;
    double loss;
    uint64_t random;
    int is_blocked;
    unsigned bytes_max; /* of a packet; 0: any */
    double held_share, held_ns; /* how many packets, by chance, are kept back on their way, and for how long */
} path;

typedef struct {
    int tun;
    uint32_t address;
    rate_link up;
    rate_link down;
    path paths[HOSTS_MAX]; /* to each host */
    uint64_t sent_packets, sent_bytes; /* into the uplink */
    uint64_t received_packets, received_bytes; /* out of the downlink */
    uint64_t dropped_up, dropped_down, lost, too_large, blocked, refused; /* refused: by the kernel, at delivery */
} host;

/* One packet, or a train of TCP packets that share a header, and what the kernel says about it. */
typedef struct {
    unsigned from, to;
    double first_ns, last_ns; /* arrival of the first and the last packet of a train at the downlink */
    uint32_t packets;
    uint32_t header_bytes; /* IP and TCP; 0 if not a train */
    uint32_t bytes; /* of `data`, IP on */
    struct virtio_net_hdr vnet;
    uint8_t data[];
} train;

_Static_assert(offsetof(train, data) == offsetof(train, vnet) + sizeof(struct virtio_net_hdr), "read and written as one");

typedef struct {
    int64_t at_ns;
    uint64_t order; /* first come, first served */
    train *train;
    int is_delivery;
} event;

static host hosts[HOSTS_MAX];
static unsigned hosts_count;
static event *heap;
static size_t heap_count, heap_room;
static uint64_t events_made;
static uint64_t deliveries, late_deliveries;
static int64_t latest_ns;

static int64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void *must(void *memory)
{
    if (memory == NULL) {
        fputs("relay: out of memory\n", stderr);
        abort();
    }
    return memory;
}

/* Events */

static int event_before(const event *a, const event *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

static void heap_push(event new)
{
    if (heap_count == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 1024;
        heap = must(realloc(heap, heap_room * sizeof *heap));
    }
    size_t i = heap_count++;
    for (; i > 0 && event_before(&new, &heap[(i - 1) / 2]); i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = new;
}

static event heap_pop(void)
{
    event first = heap[0], last = heap[--heap_count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < heap_count; i = child) {
        if (child + 1 < heap_count && event_before(&heap[child + 1], &heap[child]))
            child++;
        if (!event_before(&heap[child], &last))
            break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return first;
}

static void schedule(double at_ns, train *what, int is_delivery)
{
    event new = {(int64_t)at_ns, events_made++, what, is_delivery};
    heap_push(new);
}

/* Links */

/* A packet of `bytes` reaches the link: when its last bit leaves, or a negative number if it is dropped. */
static double link_send(rate_link *link, double at_ns, uint32_t bytes)
{
    if (link->ns_per_byte == 0)
        return at_ns;
    double start_ns = link->free_ns > at_ns ? link->free_ns : at_ns;
    if (start_ns - at_ns > link->queue_ns)
        return -1;
    return link->free_ns = start_ns + bytes * link->ns_per_byte;
}

static void link_set(rate_link *link, double bits_per_s, double queue_bytes)
{
    link->ns_per_byte = bits_per_s > 0 ? 8e9 / bits_per_s : 0;
    link->queue_ns = queue_bytes * link->ns_per_byte;
}

/* splitmix64; in [0, 1). */
static double random_next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

/* Trains */

static uint32_t sum16(uint32_t sum, const uint8_t *data, uint32_t bytes)
{
    for (uint32_t i = 0; i + 1 < bytes; i += 2)
        sum += (uint32_t)data[i] << 8 | data[i + 1];
    return sum;
}

static uint16_t folded(uint32_t sum)
{
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)sum;
}

static void put16(uint8_t *at, uint32_t value)
{
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}

static uint32_t get16(const uint8_t *at) { return (uint32_t)at[0] << 8 | at[1]; }

static uint32_t packet_payload_bytes(const train *t, uint32_t index)
{
    uint32_t payload_bytes = t->bytes - t->header_bytes;
    if (t->packets == 1)
        return payload_bytes;
    return index + 1 < t->packets ? t->vnet.gso_size : payload_bytes - index * t->vnet.gso_size;
}

static uint32_t packet_bytes(const train *t, uint32_t index)
{
    return t->packets == 1 ? t->bytes : t->header_bytes + packet_payload_bytes(t, index);
}

/* Some, but not all, packets of a train as a train of their own: what a network card's segmentation does to
 * the headers, and nothing else. */
static train *train_part(const train *whole, uint32_t first, uint32_t count)
{
    uint32_t header_bytes = whole->header_bytes, begin = first * whole->vnet.gso_size, payload_bytes = 0;
    for (uint32_t i = first; i < first + count; i++)
        payload_bytes += packet_payload_bytes(whole, i);
    train *part = must(malloc(sizeof *part + header_bytes + payload_bytes));
    *part = *whole;
    part->packets = count;
    part->bytes = header_bytes + payload_bytes;
    memcpy(part->data, whole->data, header_bytes);
    memcpy(part->data + header_bytes, whole->data + header_bytes + begin, payload_bytes);
    if (count == 1) {
        part->vnet.gso_type = VIRTIO_NET_HDR_GSO_NONE;
        part->vnet.gso_size = 0;
    }
    uint8_t *ip = part->data;
    uint32_t ip_bytes = (ip[0] & 15u) * 4;
    put16(ip + 2, part->bytes);
    put16(ip + 4, get16(ip + 4) + first);
    put16(ip + 10, 0);
    put16(ip + 10, ~folded(sum16(0, ip, ip_bytes)) & 0xffffu);
    uint8_t *tcp = ip + ip_bytes;
    uint32_t sequence = (get16(tcp + 4) << 16 | get16(tcp + 6)) + begin;
    put16(tcp + 4, sequence >> 16);
    put16(tcp + 6, sequence);
    if (first > 0)
        tcp[13] &= (uint8_t)~0x80u; /* CWR: the first only */
    if (first + count < whole->packets)
        tcp[13] &= (uint8_t)~0x09u; /* PSH, FIN: the last only */
    /* The kernel adds the rest of the checksum, or, as it trusts us, never does. */
    put16(tcp + 16, folded(sum16(IPPROTO_TCP + part->bytes - ip_bytes, ip + 12, 8)));
    return part;
}

/* One packet of a train, or of no train, as a packet of its own. */
static train *train_copy(const train *whole, uint32_t index)
{
    if (whole->packets > 1)
        return train_part(whole, index, 1);
    train *copy = must(malloc(sizeof *copy + whole->bytes));
    memcpy(copy, whole, sizeof *copy + whole->bytes);
    return copy;
}

static void arrive(train *t);

/* Splits a train into runs of packets that are not dropped (`at_ns` >= 0) and hands each on. Frees the train. */
static void train_forward(train *t, const double *at_ns, int is_delivery)
{
    for (uint32_t first = 0, end; first < t->packets; first = end) {
        for (end = first; end < t->packets && at_ns[end] >= 0; end++)
            continue;
        if (end == first) {
            end = first + 1;
            continue;
        }
        train *run = end - first == t->packets ? t : train_part(t, first, end - first);
        run->first_ns = at_ns[first];
        run->last_ns = at_ns[end - 1];
        schedule(is_delivery ? run->last_ns : run->first_ns, run, is_delivery);
        if (run == t)
            return;
    }
    free(t);
}

/* A host has sent. */
static void depart(train *t, int64_t now_ns)
{
    static double at_ns[TRAIN_MAX];
    host *from = &hosts[t->from];
    path *way = &from->paths[t->to];
    if (way->is_blocked) {
        from->blocked += t->packets;
        free(t);
        return;
    }
    for (uint32_t i = 0; i < t->packets; i++) {
        uint32_t bytes = packet_bytes(t, i);
        from->sent_packets++;
        from->sent_bytes += bytes;
        at_ns[i] = link_send(&from->up, (double)now_ns, bytes);
        if (at_ns[i] >= 0)
            at_ns[i] = link_send(&way->link, at_ns[i], bytes);
        if (at_ns[i] < 0) {
            from->dropped_up++;
        } else if (way->bytes_max > 0 && bytes > way->bytes_max) {
            from->too_large++;
            at_ns[i] = -1;
        } else if (way->loss > 0 && random_next(&way->random) < way->loss) {
            from->lost++;
            at_ns[i] = -1;
        } else {
            at_ns[i] += way->delay_ns;
            if (way->held_share > 0 && random_next(&way->random) < way->held_share) {
                train *held = train_copy(t, i);
                held->first_ns = held->last_ns = at_ns[i] + way->held_ns;
                schedule(held->first_ns, held, 0);
                at_ns[i] = -1;
            }
        }
    }
    train_forward(t, at_ns, 0);
}

/* The first packet of a train is at the downlink; the others follow evenly. */
static void arrive(train *t)
{
    static double at_ns[TRAIN_MAX];
    host *to = &hosts[t->to];
    double gap_ns = t->packets > 1 ? (t->last_ns - t->first_ns) / (t->packets - 1) : 0;
    for (uint32_t i = 0; i < t->packets; i++) {
        at_ns[i] = link_send(&to->down, t->first_ns + i * gap_ns, packet_bytes(t, i));
        to->dropped_down += at_ns[i] < 0;
    }
    train_forward(t, at_ns, 1);
}

static void deliver(train *t, int64_t late_ns)
{
    host *to = &hosts[t->to];
    deliveries++;
    late_deliveries += late_ns > LATE_NS;
    if (late_ns > latest_ns)
        latest_ns = late_ns;
    if (hosts[t->from].paths[t->to].is_blocked) {
        hosts[t->from].blocked += t->packets;
    } else if (write(to->tun, &t->vnet, VNET_BYTES + t->bytes) < 0) {
        to->refused += t->packets;
    } else {
        to->received_packets += t->packets;
        to->received_bytes += t->bytes + (t->packets - 1) * t->header_bytes;
    }
    free(t);
}

/* Reads what a host sends; what is not IPv4 for another host is none of the network's business. */
static void host_read(unsigned number)
{
    static uint8_t buffer[VNET_BYTES + PACKET_BYTES_MAX];
    for (int i = 0; i < READS_PER_WAKE_MAX; i++) {
        ssize_t n = read(hosts[number].tun, buffer, sizeof buffer);
        if (n <= (ssize_t)VNET_BYTES)
            return;
        const uint8_t *ip = buffer + VNET_BYTES;
        uint32_t bytes = (uint32_t)n - VNET_BYTES, address, to;
        if (bytes < 20 || ip[0] >> 4 != 4)
            continue;
        memcpy(&address, ip + 16, 4);
        for (to = 0; to < hosts_count && hosts[to].address != address; to++)
            continue;
        if (to == hosts_count || to == number)
            continue;
        train *t = must(malloc(sizeof *t + bytes));
        memset(t, 0, sizeof *t);
        memcpy(&t->vnet, buffer, VNET_BYTES + bytes);
        t->from = number;
        t->to = to;
        t->bytes = bytes;
        t->packets = 1;
        if (t->vnet.gso_type != VIRTIO_NET_HDR_GSO_NONE && t->vnet.gso_size > 0) {
            uint32_t ip_bytes = (ip[0] & 15u) * 4;
            t->header_bytes = ip_bytes + (uint32_t)(ip[ip_bytes + 12] >> 4) * 4;
            t->packets = (bytes - t->header_bytes + t->vnet.gso_size - 1) / t->vnet.gso_size;
            if (t->header_bytes >= bytes || t->packets > TRAIN_MAX) {
                hosts[number].refused++;
                free(t);
                continue;
            }
        }
        depart(t, clock_ns());
    }
}

/* Commands */

static const char *answer(const char *format, ...)
{
    static char text[LINE_BYTES_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return text;
}

static const char *host_attach(const char *namespace, int poller)
{
    if (hosts_count == HOSTS_MAX)
        return answer("error at most %d hosts", HOSTS_MAX);
    int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), its = open(namespace, O_RDONLY | O_CLOEXEC);
    if (own < 0 || its < 0 || setns(its, CLONE_NEWNET) != 0)
        return answer("error entering %s: %s", namespace, strerror(errno));
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    int open_error = errno;
    if (setns(own, CLONE_NEWNET) != 0)
        return answer("error returning to the own namespace: %s", strerror(errno));
    close(own);
    close(its);
    if (tun < 0)
        return answer("error /dev/net/tun: %s", strerror(open_error));
    struct ifreq request;
    memset(&request, 0, sizeof request);
    strcpy(request.ifr_name, DEVICE);
    request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
    if (ioctl(tun, TUNSETIFF, &request) != 0 || ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) != 0)
        return answer("error creating a TUN device: %s", strerror(errno));
    struct epoll_event interest = {.events = EPOLLIN, .data.u32 = hosts_count};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, tun, &interest) != 0)
        return answer("error epoll_ctl: %s", strerror(errno));
    hosts[hosts_count].tun = tun;
    return answer("ok %u", hosts_count++);
}

static const char *stats(void)
{
    static char text[HOSTS_MAX * 400 + 200];
    int n = snprintf(text, sizeof text,
        "ok {\"deliveries\": %" PRIu64 ", \"late_deliveries\": %" PRIu64 ", \"latest_us\": %.0f, \"hosts\": [", deliveries,
        late_deliveries, (double)latest_ns / 1e3);
    for (unsigned i = 0; i < hosts_count; i++)
        n += snprintf(text + n, sizeof text - (size_t)n,
            "%s{\"sent_packets\": %" PRIu64 ", \"sent_bytes\": %" PRIu64 ", \"received_packets\": %" PRIu64
            ", \"received_bytes\": %" PRIu64 ", \"dropped_up\": %" PRIu64 ", \"dropped_down\": %" PRIu64
            ", \"lost\": %" PRIu64 ", \"too_large\": %" PRIu64 ", \"blocked\": %" PRIu64 ", \"refused\": %" PRIu64 "}",
            i ? ", " : "", hosts[i].sent_packets, hosts[i].sent_bytes, hosts[i].received_packets,
            hosts[i].received_bytes, hosts[i].dropped_up, hosts[i].dropped_down, hosts[i].lost,
            hosts[i].too_large, hosts[i].blocked, hosts[i].refused);
    snprintf(text + n, sizeof text - (size_t)n, "]}");
    return text;
}

static const char *obey(const char *line, int poller)
{
    char word[LINE_BYTES_MAX];
    unsigned a, b, bytes_max;
    int yes;
    double rate, queue, delay_us, loss, share, held_us;
    uint64_t seed;
    if (sscanf(line, "host %511s", word) == 1)
        return host_attach(word, poller);
    if (sscanf(line, "address %u %511s", &a, word) == 2 && a < hosts_count)
        return inet_pton(AF_INET, word, &hosts[a].address) == 1 ? "ok" : "error not an IPv4 address";
    if (sscanf(line, "uplink %u %lf %lf", &a, &rate, &queue) == 3 && a < hosts_count) {
        link_set(&hosts[a].up, rate, queue);
        return "ok";
    }
    if (sscanf(line, "downlink %u %lf %lf", &a, &rate, &queue) == 3 && a < hosts_count) {
        link_set(&hosts[a].down, rate, queue);
        return "ok";
    }
    if (sscanf(line, "path %u %u %lf %lf %lf %lf %" SCNu64, &a, &b, &delay_us, &loss, &rate, &queue, &seed) == 7 &&
        a < hosts_count && b < hosts_count) {
        path *way = &hosts[a].paths[b];
        link_set(&way->link, rate, queue);
        way->delay_ns = delay_us * 1e3;
        way->loss = loss;
        way->random = seed;
        return "ok";
    }
    if (sscanf(line, "block %u %u %d", &a, &b, &yes) == 3 && a < hosts_count && b < hosts_count) {
        hosts[a].paths[b].is_blocked = yes;
        return "ok";
    }
    if (sscanf(line, "limit %u %u %u", &a, &b, &bytes_max) == 3 && a < hosts_count && b < hosts_count) {
        hosts[a].paths[b].bytes_max = bytes_max;
        return "ok";
    }
    if (sscanf(line, "reorder %u %u %lf %lf", &a, &b, &share, &held_us) == 4 && a < hosts_count && b < hosts_count) {
        hosts[a].paths[b].held_share = share;
        hosts[a].paths[b].held_ns = held_us * 1e3;
        return "ok";
    }
    if (strcmp(line, "stats") == 0)
        return stats();
    return answer("error no such command or host: %.400s", line);
}

/* False at the end of stdin. */
static int obey_all(int poller)
{
    static char lines[4096];
    static size_t held;
    ssize_t n = read(STDIN_FILENO, lines + held, sizeof lines - held);
    if (n < 0)
        return errno == EINTR || errno == EAGAIN;
    if (n == 0)
        return 0;
    held += (size_t)n;
    for (char *end; (end = memchr(lines, '\n', held)) != NULL;) {
        *end = 0;
        puts(obey(lines, poller));
        fflush(stdout);
        held -= (size_t)(end + 1 - lines);
        memmove(lines, end + 1, held);
    }
    return held < sizeof lines;
}

static void timer_set(int timer, int64_t at_ns)
{
    struct itimerspec when = {.it_value = {at_ns / 1000000000, at_ns % 1000000000}};
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL);
}

int main(void)
{
    enum { COMMANDS = HOSTS_MAX, TIMER };
    /* A network does not wait for its hosts to give up a core. Where that is not permitted, it does. */
    struct sched_param first = {.sched_priority = 1};
    (void)sched_setscheduler(0, SCHED_FIFO, &first);
    int poller = epoll_create1(EPOLL_CLOEXEC), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    struct epoll_event commands_event = {.events = EPOLLIN, .data.u32 = COMMANDS};
    struct epoll_event timer_event = {.events = EPOLLIN, .data.u32 = TIMER};
    if (poller < 0 || timer < 0 || epoll_ctl(poller, EPOLL_CTL_ADD, STDIN_FILENO, &commands_event) != 0 ||
        epoll_ctl(poller, EPOLL_CTL_ADD, timer, &timer_event) != 0) {
        perror("relay");
        return 1;
    }
    for (int64_t timer_ns = NEVER;;) {
        int64_t now_ns = clock_ns();
        while (heap_count > 0 && heap[0].at_ns <= now_ns) {
            event due = heap_pop();
            if (due.is_delivery)
                deliver(due.train, now_ns - due.at_ns);
            else
                arrive(due.train);
            now_ns = clock_ns();
        }
        int64_t next_ns = heap_count > 0 ? heap[0].at_ns : NEVER;
        if (next_ns != timer_ns && next_ns != NEVER)
            timer_set(timer, next_ns);
        timer_ns = next_ns;

        struct epoll_event ready[HOSTS_MAX + 2];
        int ready_count = epoll_wait(poller, ready, HOSTS_MAX + 2, -1);
        for (int i = 0; i < ready_count; i++) {
            if (ready[i].data.u32 == COMMANDS) {
                if (!obey_all(poller))
                    return 0;
            } else if (ready[i].data.u32 == TIMER) {
                uint64_t expirations;
                (void)!read(timer, &expirations, sizeof expirations);
                timer_ns = NEVER;
            } else {
                host_read(ready[i].data.u32);
            }
        }
    }
}
