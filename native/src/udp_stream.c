#include "udp_stream.h"

#include "base.h"
#include "bbr.h"
#include "siphash.h"

#include <stdlib.h>
#include <string.h>

enum {
    KIND_DATA = 1,
    KIND_ACK,
    KIND_CLOSE,
    KIND_SHIFT = 56,

    HEADER_BYTES = PCCL_UDP_HEADER_BYTES,
    IP_BYTES = 28, /* counted with each datagram */
    ACK_RANGES = 64,
    ACK_RANGES_AGAIN = 8, /* that an ACK repeats of earlier ones, which may be lost */
    ACK_FIXED_BYTES = 32,
    ACK_BYTES_MAX = ACK_FIXED_BYTES + 8 * ACK_RANGES,
    ACK_PACKETS = 16, /* arrived: then an ACK goes out at once */
    GAPS_MAX = 1024, /* ranges that have arrived beyond a missing byte */
    RING_BYTES_MIN = 64 << 10,
    PACKETS_MIN = 256,
    PACKETS_MAX = 1 << 16,
    REORDER_PACKETS = 3,
    REORDER_STEPS_MAX = 8, /* eighths of a round trip */
    REORDER_ROUNDS = 16, /* without a duplicate: the patience ends */
    SILENT_PROBES = 3, /* then all in flight is taken for lost */
    BACKOFF_MAX = 6,
    SIZE_TRIES = 2
};

#define ACK_DELAY_MIN_NS INT64_C(1000000)
#define ACK_DELAY_MAX_NS INT64_C(5000000)
#define QUANTUM_NS INT64_C(1000000)
#define LATE_NS INT64_C(8000000) /* a sender that comes late makes up for as much */
#define GRANULE_NS INT64_C(1000000)
#define FIRST_TIMEOUT_NS INT64_C(100000000)
#define LONGEST_TIMEOUT_NS INT64_C(1000000000)
#define OFFSET_PERIOD_NS INT64_C(10000000000)
#define NEVER INT64_MAX

static const uint16_t datagram_sizes[] = {PCCL_UDP_DATAGRAM_BYTES_MAX, 1452, 1432, 1400, 1360, 1280};

typedef struct {
    uint8_t *at;
    size_t size; /* a power of two */
} ring;

enum { IN_FLIGHT = 1, ACKED, LOST };

typedef struct {
    uint64_t offset;
    uint64_t delivered_bytes; /* when it was sent, and when the last of these was acknowledged */
    int64_t delivered_ns;
    int64_t peer_us; /* when that had arrived, by the other end's clock; 0: not known */
    int64_t first_sent_ns; /* of the packets that these were measured with */
    int64_t sent_ns;
    uint16_t bytes;
    uint8_t state;
    uint8_t is_app_limited;
    uint8_t is_size_probe;
} packet;

typedef struct {
    uint64_t begin;
    uint64_t end;
} range;

struct pccl_udp_stream {
    uint64_t key_out[2];
    uint64_t key_in[2];
    pccl_bbr bbr;
    int64_t looked_ns; /* busy_us counts from there */

    /* Out. Offsets of the stream. */
    ring out;
    uint64_t acked_offset;
    uint64_t sent_offset; /* sent at least once */
    uint64_t end_offset; /* taken */
    uint64_t limit_offset; /* the other end has room for */
    uint8_t is_blocked; /* by that, or by the largest buffer */
    uint8_t is_blocked_by_receiver;

    packet *packets; /* at their number modulo the count */
    size_t packets_count;
    uint64_t first_packet; /* that may be in flight */
    uint64_t next_packet;
    uint64_t largest_acked; /* plus one */
    range *resends; /* of the stream: lost; a queue of as many */
    uint64_t resends_begin;
    uint64_t resends_end;
    uint32_t copies; /* of these, to be sent twice: duplicates of which the other end is yet to count */

    uint64_t in_flight_bytes;
    uint64_t in_flight_packets;
    uint64_t delivered_bytes;
    int64_t delivered_ns;
    int64_t peer_us;
    int64_t first_sent_ns;
    uint64_t app_limited_bytes; /* until so many are delivered */
    int64_t last_sent_ns;
    int64_t pace_ns; /* when the next packet may leave */
    int64_t loss_ns; /* when the next packet is lost, unless acknowledged */
    unsigned backoff; /* probes without an answer */
    uint8_t is_probe_due;
    uint8_t is_open;

    int64_t round_trip_ns; /* 0: not known */
    int64_t round_trip_var_ns;
    int64_t latest_round_trip_ns;
    int64_t offset_us[2]; /* the least of delay plus difference of clocks: in this period, and the one before */
    int64_t offset_began_ns;
    unsigned reorder_steps; /* 0: packets come in order */
    uint64_t reorder_until; /* until so many packets were sent */
    uint64_t reorder_round; /* the step has been raised for packets before this one */

    size_t datagram_bytes;
    unsigned size_at; /* of datagram_sizes: to be tried */
    unsigned size_fails;
    uint8_t is_size_probed; /* one is in flight */

    pccl_udp_stats stats;

    /* In. */
    ring in;
    uint64_t read_offset;
    uint64_t in_order_offset;
    uint64_t advertised_offset;
    unsigned gaps_count;
    range gaps[GAPS_MAX]; /* have arrived beyond in_order_offset, in order */
    unsigned arrived_count;
    range arrived[ACK_RANGES]; /* packet numbers, latest first */
    uint64_t reported_end; /* of the latest of them in the last ACK */
    int64_t arrived_ns; /* the one sent last */
    uint32_t duplicates;
    unsigned unacked_arrivals;
    int64_t ack_ns;
    uint64_t acks_sent;
    uint8_t is_ack_due;
    uint8_t is_ack_urgent;
    uint8_t has_ended;
    uint8_t ack[ACK_BYTES_MAX];
};

/* Rings */

static void ring_put(ring *r, uint64_t offset, const uint8_t *from, size_t bytes)
{
    size_t at = (size_t)offset & (r->size - 1);
    size_t first = pccl_min_size(bytes, r->size - at);
    memcpy(r->at + at, from, first);
    memcpy(r->at, from + first, bytes - first);
}

/* Has room for the bytes from `begin` to `end`; keeps those up to `kept_end`. 0, or -1: no memory. */
static int ring_hold(ring *r, uint64_t begin, uint64_t kept_end, uint64_t end)
{
    size_t size = r->size;
    while (size < end - begin)
        size *= 2;
    if (size == r->size)
        return 0;
    ring larger = {malloc(size), size};
    if (larger.at == NULL)
        return -1;
    for (uint64_t at = begin; at < kept_end;) {
        size_t from = (size_t)at & (r->size - 1);
        size_t bytes = (size_t)pccl_min_u64(kept_end - at, r->size - from);
        ring_put(&larger, at, r->at + from, bytes);
        at += bytes;
    }
    free(r->at);
    *r = larger;
    return 0;
}

/* Life */

pccl_udp_stream *pccl_udp_stream_create(const uint8_t secret[PCCL_UDP_SECRET_BYTES], int is_dialer, int64_t now_ns)
{
    pccl_udp_stream *s = calloc(1, sizeof *s);
    if (s == NULL)
        return NULL;
    for (int i = 0; i < 2; i++) {
        uint64_t dialers = pccl_get_u64(secret + 8 * i);
        uint64_t acceptors = pccl_get_u64(secret + 16 + 8 * i);
        s->key_out[i] = is_dialer ? dialers : acceptors;
        s->key_in[i] = is_dialer ? acceptors : dialers;
    }
    s->out.size = s->in.size = RING_BYTES_MIN;
    s->out.at = malloc(s->out.size);
    s->in.at = malloc(s->in.size);
    s->packets_count = PACKETS_MIN;
    s->packets = calloc(s->packets_count, sizeof *s->packets);
    s->resends = calloc(s->packets_count, sizeof *s->resends);
    if (s->out.at == NULL || s->in.at == NULL || s->packets == NULL || s->resends == NULL) {
        pccl_udp_stream_free(s);
        return NULL;
    }
    s->datagram_bytes = PCCL_UDP_DATAGRAM_BYTES_MIN;
    pccl_bbr_init(&s->bbr, PCCL_UDP_DATAGRAM_BYTES_MAX + IP_BYTES, now_ns / 1000);
    s->limit_offset = s->advertised_offset = PCCL_UDP_BUFFER_BYTES_MAX;
    s->looked_ns = s->pace_ns = now_ns;
    s->loss_ns = s->ack_ns = NEVER;
    s->offset_us[0] = s->offset_us[1] = INT64_MAX;
    s->offset_began_ns = now_ns;
    s->is_probe_due = 1; /* finds out whether datagrams get through */
    return s;
}

void pccl_udp_stream_free(pccl_udp_stream *s)
{
    if (s == NULL)
        return;
    free(s->out.at);
    free(s->in.at);
    free(s->packets);
    free(s->resends);
    free(s);
}

static void stream_count_time(pccl_udp_stream *s, int64_t now_ns)
{
    int64_t us = (now_ns - s->looked_ns) / 1000;
    if (us <= 0)
        return;
    s->looked_ns += us * 1000;
    if (s->acked_offset == s->end_offset)
        return;
    s->stats.busy_us += us;
    s->stats.window_us += s->is_blocked ? us : 0;
    s->stats.receiver_us += s->is_blocked_by_receiver ? us : 0;
}

/* Out: packets */

static packet *packet_at(const pccl_udp_stream *s, uint64_t number)
{
    return &s->packets[number & (s->packets_count - 1)];
}

static uint64_t packets_used(const pccl_udp_stream *s)
{
    return s->next_packet - s->first_packet + (s->resends_end - s->resends_begin);
}

/* Has room for one more packet, of new bytes (`is_new`) or of lost ones. Each packet in flight may have to be
 * sent again, in two parts if the path has come to carry smaller ones only. 0, or -1. */
static int packets_hold(pccl_udp_stream *s, int is_new)
{
    if (packets_used(s) < (is_new ? s->packets_count / 2 : s->packets_count))
        return 0;
    size_t count = 2 * s->packets_count;
    if (count > PACKETS_MAX)
        return -1;
    packet *packets = calloc(count, sizeof *packets);
    range *resends = calloc(count, sizeof *resends);
    if (packets == NULL || resends == NULL) {
        free(packets);
        free(resends);
        return -1;
    }
    for (uint64_t number = s->first_packet; number != s->next_packet; number++)
        packets[number & (count - 1)] = *packet_at(s, number);
    for (uint64_t i = s->resends_begin; i != s->resends_end; i++)
        resends[i & (count - 1)] = s->resends[i & (s->packets_count - 1)];
    free(s->packets);
    free(s->resends);
    s->packets = packets;
    s->resends = resends;
    s->packets_count = count;
    return 0;
}

static void header_seal(const pccl_udp_stream *s, pccl_udp_datagram *d, uint64_t kind, uint64_t number, uint64_t offset)
{
    pccl_put_u64(d->header + 8, kind << KIND_SHIFT | number);
    pccl_put_u64(d->header + 16, offset);
    pccl_put_u64(d->header,
        pccl_siphash_2_4(s->key_out[0], s->key_out[1], d->header + 8, HEADER_BYTES - 8, d->payload, d->payload_bytes));
}

static uint64_t wire_bytes(size_t payload_bytes) { return payload_bytes + HEADER_BYTES + IP_BYTES; }

static void packet_send(pccl_udp_stream *s, pccl_udp_datagram *d, uint64_t offset, size_t bytes, int64_t now_ns)
{
    uint64_t number = s->next_packet++;
    packet *p = packet_at(s, number);
    if (s->in_flight_packets == 0) {
        s->first_sent_ns = s->delivered_ns = now_ns;
        s->peer_us = 0;
        s->copies = 0;
        pccl_bbr_note_restart(&s->bbr);
    }
    p->offset = offset;
    p->bytes = (uint16_t)bytes;
    p->delivered_bytes = s->delivered_bytes;
    p->delivered_ns = s->delivered_ns;
    p->peer_us = s->peer_us;
    p->first_sent_ns = s->first_sent_ns;
    p->sent_ns = now_ns;
    p->state = IN_FLIGHT;
    p->is_app_limited = s->app_limited_bytes > 0;
    p->is_size_probe = 0;
    s->in_flight_packets++;
    s->in_flight_bytes += wire_bytes(bytes);
    s->last_sent_ns = now_ns;
    s->stats.sent_packets++;
    d->payload = s->out.at + ((size_t)offset & (s->out.size - 1));
    d->payload_bytes = bytes;
    header_seal(s, d, KIND_DATA, number, offset);
}

static void resends_add(pccl_udp_stream *s, uint64_t begin, uint64_t end)
{
    PCCL_ASSERT(s->resends_end - s->resends_begin < s->packets_count);
    range *again = &s->resends[s->resends_end++ & (s->packets_count - 1)];
    again->begin = begin;
    again->end = end;
}

static void packet_lose(pccl_udp_stream *s, packet *p)
{
    p->state = LOST;
    s->in_flight_packets--;
    s->in_flight_bytes -= wire_bytes(p->bytes);
    if (p->is_size_probe) {
        s->is_size_probed = 0;
        if (++s->size_fails >= SIZE_TRIES) {
            s->size_fails = 0;
            s->size_at++;
        }
    } else {
        s->stats.lost_packets++;
    }
    if (p->bytes == 0 || p->offset + p->bytes <= s->acked_offset)
        return;
    resends_add(s, p->offset, p->offset + p->bytes);
    /* At the end of what there is to send, a second loss would cost one more round trip. */
    if (s->sent_offset == s->end_offset && packets_used(s) < s->packets_count / 2) {
        resends_add(s, p->offset, p->offset + p->bytes);
        s->copies++;
    }
}

static void packets_forget(pccl_udp_stream *s)
{
    while (s->first_packet != s->next_packet && packet_at(s, s->first_packet)->state != IN_FLIGHT)
        s->first_packet++;
}

static void packets_find_lost(pccl_udp_stream *s, int64_t now_ns)
{
    int64_t round_trip_ns = s->round_trip_ns > s->latest_round_trip_ns ? s->round_trip_ns : s->latest_round_trip_ns;
    int64_t patience_ns = round_trip_ns / 8 * (s->reorder_steps > 0 ? s->reorder_steps : 1);
    if (patience_ns < GRANULE_NS)
        patience_ns = GRANULE_NS;
    s->loss_ns = NEVER;
    for (uint64_t number = s->first_packet; number < s->largest_acked; number++) {
        packet *p = packet_at(s, number);
        if (p->state != IN_FLIGHT)
            continue;
        int64_t lost_ns = p->sent_ns + round_trip_ns + patience_ns;
        int is_behind = s->reorder_steps == 0 && s->largest_acked - 1 - number >= REORDER_PACKETS;
        if (lost_ns > now_ns && !is_behind) {
            s->loss_ns = lost_ns;
            break;
        }
        packet_lose(s, p);
    }
    packets_forget(s);
}

/* How long an ACK waits for more packets: an eighth of the round trip, within bounds. */
static int64_t stream_ack_delay_ns(const pccl_udp_stream *s)
{
    int64_t ns = s->round_trip_ns / 8;
    return ns < ACK_DELAY_MIN_NS ? ACK_DELAY_MIN_NS : ns < ACK_DELAY_MAX_NS ? ns : ACK_DELAY_MAX_NS;
}

static int64_t stream_timeout_ns(const pccl_udp_stream *s)
{
    if (!s->is_open || s->round_trip_ns == 0)
        return FIRST_TIMEOUT_NS;
    int64_t slack_ns = 4 * s->round_trip_var_ns;
    int64_t ns = s->round_trip_ns + (slack_ns > GRANULE_NS ? slack_ns : GRANULE_NS) + 4 * stream_ack_delay_ns(s);
    int64_t longest_ns = ns > LONGEST_TIMEOUT_NS ? ns : LONGEST_TIMEOUT_NS;
    ns <<= s->backoff < BACKOFF_MAX ? s->backoff : BACKOFF_MAX;
    return ns < longest_ns ? ns : longest_ns;
}

/* When a probe is to be sent. */
static int64_t stream_probe_ns(const pccl_udp_stream *s)
{
    int is_stopped = s->is_blocked_by_receiver && s->in_flight_packets == 0;
    return s->in_flight_packets > 0 || is_stopped ? s->last_sent_ns + stream_timeout_ns(s) : NEVER;
}

static void stream_time_out(pccl_udp_stream *s)
{
    s->is_probe_due = 1;
    if (!s->is_open || ++s->backoff < SILENT_PROBES)
        return;
    for (uint64_t number = s->first_packet; number != s->next_packet; number++) {
        packet *p = packet_at(s, number);
        if (p->state == IN_FLIGHT)
            packet_lose(s, p);
    }
    packets_forget(s);
    s->loss_ns = NEVER;
    pccl_bbr_note_silence(&s->bbr);
    /* Perhaps the path carries only smaller ones by now. */
    s->datagram_bytes = PCCL_UDP_DATAGRAM_BYTES_MIN;
    s->size_at = s->size_fails = 0;
}

/* Out: acknowledgements */

static void stream_learn_round_trip(pccl_udp_stream *s, int64_t ns)
{
    s->latest_round_trip_ns = ns;
    if (s->round_trip_ns == 0) {
        s->round_trip_ns = ns;
        s->round_trip_var_ns = ns / 2;
        return;
    }
    int64_t difference_ns = s->round_trip_ns > ns ? s->round_trip_ns - ns : ns - s->round_trip_ns;
    s->round_trip_var_ns += (difference_ns - s->round_trip_var_ns) / 4;
    s->round_trip_ns += (ns - s->round_trip_ns) / 8;
}

/* Returns the time for which a packet has waited on its path here, with the least of late as none. */
static int64_t stream_learn_offset(pccl_udp_stream *s, int64_t offset_us, int64_t now_ns)
{
    if (now_ns - s->offset_began_ns > OFFSET_PERIOD_NS) {
        s->offset_us[1] = now_ns - s->offset_began_ns > 2 * OFFSET_PERIOD_NS ? offset_us : s->offset_us[0];
        s->offset_us[0] = offset_us;
        s->offset_began_ns = now_ns;
    }
    if (offset_us < s->offset_us[0])
        s->offset_us[0] = offset_us;
    return offset_us - (s->offset_us[0] < s->offset_us[1] ? s->offset_us[0] : s->offset_us[1]);
}

static void stream_learn_duplicates(pccl_udp_stream *s, uint32_t duplicates)
{
    uint32_t more = duplicates - (uint32_t)s->stats.duplicate_packets;
    if (more == 0 || more > UINT32_MAX / 2) {
        if (s->first_packet >= s->reorder_until)
            s->reorder_steps = 0;
        return;
    }
    s->stats.duplicate_packets += more;
    uint32_t expected = pccl_min_u32(more, s->copies);
    s->copies -= expected;
    if (more == expected)
        return;
    if (s->first_packet >= s->reorder_round) {
        s->reorder_round = s->next_packet;
        s->reorder_steps = s->reorder_steps < REORDER_STEPS_MAX ? s->reorder_steps + 1 : REORDER_STEPS_MAX;
    }
    uint64_t in_flight = pccl_max_u64(s->next_packet - s->first_packet, 64);
    s->reorder_until = s->next_packet + REORDER_ROUNDS * in_flight;
}

/* The packets from `begin` up to `end` have arrived. `latest` is the number after the last one that was not known yet. */
static void packets_acked(pccl_udp_stream *s, uint64_t begin, uint64_t end, int64_t now_ns, uint64_t *latest)
{
    for (uint64_t number = end; number > begin && number > s->first_packet; number--) {
        packet *p = packet_at(s, number - 1);
        if (p->state != IN_FLIGHT)
            continue;
        p->state = ACKED;
        s->in_flight_packets--;
        s->in_flight_bytes -= wire_bytes(p->bytes);
        s->delivered_bytes += wire_bytes(p->bytes);
        s->delivered_ns = now_ns;
        s->stats.delivered_packets++;
        if (p->is_size_probe) {
            s->is_size_probed = 0;
            s->datagram_bytes = pccl_max_size(s->datagram_bytes, p->bytes + (size_t)HEADER_BYTES);
        }
        *latest = pccl_max_u64(*latest, number);
    }
}

static const char *stream_on_ack(
    pccl_udp_stream *s, uint64_t offset, const uint8_t *payload, size_t bytes, int64_t now_ns)
{
    static const char *const bad = "an acknowledgement of what was not sent";
    if (bytes < ACK_FIXED_BYTES + 4 || bytes > ACK_BYTES_MAX || bytes % 8 != 4)
        return "an acknowledgement of a wrong size";
    uint64_t end = pccl_get_u64(payload + 8) + 1;
    if (end > s->next_packet || offset > s->sent_offset)
        return bad;
    s->limit_offset = pccl_max_u64(s->limit_offset, pccl_get_u64(payload));
    s->acked_offset = pccl_max_u64(s->acked_offset, offset);
    s->is_open = 1;

    uint64_t latest_end = 0;
    uint64_t delivered_before = s->delivered_bytes;
    uint64_t range_end = end;
    const uint8_t *at = payload + ACK_FIXED_BYTES;
    for (size_t left = bytes - ACK_FIXED_BYTES;;) {
        uint32_t count = pccl_get_u32(at);
        if (count == 0 || count > range_end)
            return bad;
        packets_acked(s, range_end - count, range_end, now_ns, &latest_end);
        range_end -= count;
        at += 4;
        left -= 4;
        if (left == 0)
            break;
        uint32_t gap = pccl_get_u32(at);
        if (gap == 0 || gap > range_end)
            return bad;
        range_end -= gap;
        at += 4;
        left -= 4;
    }
    s->largest_acked = pccl_max_u64(s->largest_acked, end);
    stream_learn_duplicates(s, pccl_get_u32(payload + 20));
    if (s->app_limited_bytes > 0 && s->delivered_bytes > s->app_limited_bytes)
        s->app_limited_bytes = 0;

    pccl_bbr_sample sample;
    memset(&sample, 0, sizeof sample);
    sample.queue_us = -1;
    int64_t peer_us = (int64_t)(pccl_get_u64(payload + 24) & INT64_MAX >> 1);
    if (latest_end != 0) {
        const packet *latest = packet_at(s, latest_end - 1);
        s->backoff = 0;
        int64_t round_trip_ns = now_ns - latest->sent_ns;
        int64_t delay_ns = (int64_t)pccl_get_u32(payload + 16) * 1000;
        if (latest_end == end) {
            round_trip_ns -= delay_ns < round_trip_ns ? delay_ns : 0;
            sample.round_trip_us = round_trip_ns >= 1000 ? round_trip_ns / 1000 : 1;
            stream_learn_round_trip(s, sample.round_trip_us * 1000);
            sample.queue_us = stream_learn_offset(s, peer_us - latest->sent_ns / 1000, now_ns);
        }
        int64_t sending_us = (latest->sent_ns - latest->first_sent_ns) / 1000;
        /* By the other end's clock, since acknowledgements may wait in a queue and then come all at once. */
        int64_t arriving_us = latest->peer_us > 0 ? peer_us - latest->peer_us : (now_ns - latest->delivered_ns) / 1000;
        sample.sample_us = sending_us > arriving_us ? sending_us : arriving_us;
        s->peer_us = s->peer_us > peer_us ? s->peer_us : peer_us;
        sample.sample_bytes = s->delivered_bytes - latest->delivered_bytes;
        sample.sent_delivered_bytes = latest->delivered_bytes;
        sample.is_app_limited = latest->is_app_limited;
        s->first_sent_ns = latest->sent_ns;
    }
    packets_find_lost(s, now_ns);
    if (latest_end == 0)
        return NULL;
    sample.now_us = now_ns / 1000;
    sample.acked_bytes = s->delivered_bytes - delivered_before;
    sample.delivered_bytes = s->delivered_bytes;
    sample.in_flight_bytes = s->in_flight_bytes;
    pccl_bbr_note_acked(&s->bbr, &sample);
    return NULL;
}

/* Out: bytes */

size_t pccl_udp_stream_write(
    pccl_udp_stream *s, const struct iovec *iov, int count, size_t unsent_bytes_max, int64_t now_ns)
{
    size_t taken_bytes = 0;
    stream_count_time(s, now_ns);
    for (int i = 0; i < count; i++) {
        uint64_t unsent_bytes = s->end_offset - s->sent_offset;
        if (unsent_bytes >= unsent_bytes_max)
            break;
        size_t bytes = (size_t)pccl_min_u64(iov[i].iov_len, unsent_bytes_max - unsent_bytes);
        bytes = (size_t)pccl_min_u64(bytes, PCCL_UDP_BUFFER_BYTES_MAX - (s->end_offset - s->acked_offset));
        if (bytes == 0 || ring_hold(&s->out, s->acked_offset, s->end_offset, s->end_offset + bytes) != 0)
            break;
        ring_put(&s->out, s->end_offset, iov[i].iov_base, bytes);
        s->end_offset += bytes;
        taken_bytes += bytes;
        if (bytes < iov[i].iov_len)
            break;
    }
    return taken_bytes;
}

/* As much of it as goes into one packet: in one piece of the ring. */
static size_t stream_cut(const pccl_udp_stream *s, uint64_t begin, uint64_t end, size_t datagram_bytes)
{
    size_t to_ring_end = s->out.size - ((size_t)begin & (s->out.size - 1));
    return (size_t)pccl_min_u64(end - begin, pccl_min_size(datagram_bytes - HEADER_BYTES, to_ring_end));
}

/* Finds the next bytes to be sent: returns how many. */
static size_t stream_next(pccl_udp_stream *s, uint64_t *begin)
{
    for (; s->resends_begin != s->resends_end; s->resends_begin++) {
        range *again = &s->resends[s->resends_begin & (s->packets_count - 1)];
        again->begin = pccl_max_u64(again->begin, s->acked_offset);
        *begin = again->begin;
        if (again->begin < again->end)
            return stream_cut(s, again->begin, again->end, s->datagram_bytes);
    }
    *begin = s->sent_offset;
    uint64_t end = pccl_min_u64(s->end_offset, s->limit_offset);
    return s->sent_offset < end ? stream_cut(s, s->sent_offset, end, s->datagram_bytes) : 0;
}

static void stream_note_sent(pccl_udp_stream *s, uint64_t begin, size_t bytes)
{
    if (begin == s->sent_offset)
        s->sent_offset += bytes;
    else
        s->resends[s->resends_begin & (s->packets_count - 1)].begin = begin + bytes;
}

/* Lost bytes, the oldest in flight, new ones, or none. */
static void stream_send_probe(pccl_udp_stream *s, pccl_udp_datagram *d, int64_t now_ns)
{
    uint64_t begin;
    size_t bytes = stream_next(s, &begin);
    if (bytes > 0 && begin != s->sent_offset) {
        stream_note_sent(s, begin, bytes);
    } else if (s->acked_offset < s->sent_offset) {
        begin = s->acked_offset;
        bytes = stream_cut(s, begin, s->sent_offset, s->datagram_bytes);
    } else if (bytes > 0) {
        stream_note_sent(s, begin, bytes);
    }
    packet_send(s, d, begin, bytes, now_ns);
}

static int stream_send_size_probe(pccl_udp_stream *s, pccl_udp_datagram *d, int64_t now_ns)
{
    if (!s->is_open || s->is_size_probed || s->size_at == PCCL_COUNT_OF(datagram_sizes) ||
        s->resends_begin != s->resends_end || packets_hold(s, 1) != 0)
        return 0;
    size_t datagram_bytes = datagram_sizes[s->size_at];
    if (datagram_bytes <= s->datagram_bytes) {
        s->size_at = PCCL_COUNT_OF(datagram_sizes);
        return 0;
    }
    uint64_t begin = s->sent_offset;
    uint64_t end = pccl_min_u64(s->end_offset, s->limit_offset);
    if (stream_cut(s, begin, end, datagram_bytes) + HEADER_BYTES < datagram_bytes)
        return 0;
    stream_note_sent(s, begin, datagram_bytes - HEADER_BYTES);
    packet_send(s, d, begin, datagram_bytes - HEADER_BYTES, now_ns);
    packet_at(s, s->next_packet - 1)->is_size_probe = 1;
    s->is_size_probed = 1;
    return 1;
}

void pccl_udp_stream_note_too_large(pccl_udp_stream *s, size_t bytes)
{
    for (uint64_t number = s->first_packet; number != s->next_packet; number++) {
        packet *p = packet_at(s, number);
        if (p->state == IN_FLIGHT && p->is_size_probe && p->bytes + (size_t)HEADER_BYTES == bytes) {
            s->size_fails = SIZE_TRIES;
            packet_lose(s, p);
        }
    }
    if (bytes <= s->datagram_bytes) {
        s->datagram_bytes = PCCL_UDP_DATAGRAM_BYTES_MIN;
        s->size_at = s->size_fails = 0;
    }
}

static void stream_send_ack(pccl_udp_stream *s, pccl_udp_datagram *d, int64_t now_ns)
{
    s->advertised_offset = s->read_offset + PCCL_UDP_BUFFER_BYTES_MAX;
    pccl_put_u64(s->ack, s->advertised_offset);
    pccl_put_u64(s->ack + 8, s->arrived[0].end - 1);
    int64_t delay_us = (now_ns - s->arrived_ns) / 1000;
    pccl_put_u32(s->ack + 16, (uint32_t)(delay_us < 0 ? 0 : delay_us < UINT32_MAX ? delay_us : UINT32_MAX));
    pccl_put_u32(s->ack + 20, s->duplicates);
    pccl_put_u64(s->ack + 24, (uint64_t)s->arrived_ns / 1000);
    uint8_t *at = s->ack + ACK_FIXED_BYTES;
    for (unsigned i = 0; i < s->arrived_count; i++) {
        if (i >= ACK_RANGES_AGAIN && s->arrived[i].end <= s->reported_end)
            break;
        uint64_t numbers[2] = {
            i > 0 ? s->arrived[i - 1].begin - s->arrived[i].end : 0, s->arrived[i].end - s->arrived[i].begin};
        if (numbers[0] > UINT32_MAX)
            break;
        if (i > 0) {
            pccl_put_u32(at, (uint32_t)numbers[0]);
            at += 4;
        }
        pccl_put_u32(at, (uint32_t)pccl_min_u64(numbers[1], UINT32_MAX));
        at += 4;
        if (numbers[1] > UINT32_MAX)
            break;
    }
    s->reported_end = s->arrived[0].end;
    d->payload = s->ack;
    d->payload_bytes = (size_t)(at - s->ack);
    header_seal(s, d, KIND_ACK, s->acks_sent++, s->in_order_offset);
    s->is_ack_due = s->is_ack_urgent = 0;
    s->unacked_arrivals = 0;
    s->ack_ns = NEVER;
}

int pccl_udp_stream_output(pccl_udp_stream *s, int64_t now_ns, pccl_udp_datagram *d, int max)
{
    stream_count_time(s, now_ns);
    if (s->loss_ns <= now_ns)
        packets_find_lost(s, now_ns);
    if (stream_probe_ns(s) <= now_ns)
        stream_time_out(s);
    if (s->is_ack_due && (s->is_ack_urgent || s->ack_ns <= now_ns)) {
        stream_send_ack(s, d, now_ns);
        return 1;
    }
    if (s->is_probe_due && packets_hold(s, 0) == 0) {
        s->is_probe_due = 0;
        stream_send_probe(s, d, now_ns);
        return 1;
    }
    if (s->pace_ns > now_ns)
        return 0;
    if (s->pace_ns < now_ns - LATE_NS)
        s->pace_ns = s->in_flight_packets > 0 ? now_ns - LATE_NS : now_ns;
    uint64_t pace = pccl_bbr_pace(&s->bbr);
    if (s->in_flight_bytes + wire_bytes(PCCL_UDP_DATAGRAM_BYTES_MAX) <= s->bbr.window_bytes &&
        stream_send_size_probe(s, d, now_ns)) {
        s->pace_ns += (int64_t)(wire_bytes(d->payload_bytes) * 1000000000 / pace);
        return 1;
    }
    int count = 0;
    s->is_blocked = s->is_blocked_by_receiver = 0;
    while (count < max && s->pace_ns <= now_ns + QUANTUM_NS) {
        uint64_t begin;
        size_t bytes = stream_next(s, &begin);
        if (bytes == 0) {
            s->is_blocked_by_receiver = s->sent_offset < s->end_offset;
            s->is_blocked = s->is_blocked_by_receiver || s->end_offset - s->acked_offset >= PCCL_UDP_BUFFER_BYTES_MAX;
            if (s->in_flight_bytes < s->bbr.window_bytes)
                s->app_limited_bytes = pccl_max_u64(s->delivered_bytes + s->in_flight_bytes, 1);
            break;
        }
        if (s->in_flight_bytes + wire_bytes(bytes) > s->bbr.window_bytes || (count > 0 && bytes > d[0].payload_bytes) ||
            packets_hold(s, begin == s->sent_offset) != 0)
            break;
        stream_note_sent(s, begin, bytes);
        packet_send(s, &d[count++], begin, bytes, now_ns);
        s->pace_ns += (int64_t)(wire_bytes(bytes) * 1000000000 / pace);
        if (bytes < d[0].payload_bytes)
            break;
    }
    return count;
}

int64_t pccl_udp_stream_deadline_ns(const pccl_udp_stream *s)
{
    int64_t ns = s->loss_ns;
    int64_t probe_ns = stream_probe_ns(s);
    if (probe_ns < ns)
        ns = probe_ns;
    if (s->is_ack_due && s->ack_ns < ns)
        ns = s->ack_ns;
    int has_more = s->resends_begin != s->resends_end || s->sent_offset < pccl_min_u64(s->end_offset, s->limit_offset);
    int is_window_open = s->in_flight_bytes + wire_bytes(s->datagram_bytes) <= s->bbr.window_bytes;
    if (has_more && is_window_open && s->pace_ns < ns)
        ns = s->pace_ns;
    return ns;
}

/* In */

/* Removes `count` ranges from `at` on, or makes room for one. */
static void ranges_move(range *ranges, unsigned *ranges_count, unsigned at, int count)
{
    memmove(&ranges[(int)at + (count < 0 ? 1 : 0)], &ranges[(int)at + (count > 0 ? count : 0)],
        (*ranges_count - at - (unsigned)(count > 0 ? count : 0)) * sizeof *ranges);
    *ranges_count = (unsigned)((int)*ranges_count - count);
}

/* Notes the packet's number. */
static void arrived_add(pccl_udp_stream *s, uint64_t number)
{
    range *r = s->arrived;
    unsigned i = 0;
    while (i < s->arrived_count && number < r[i].begin)
        i++;
    /* Now r[i], if any, begins at or before the number, and r[i - 1] after it. */
    if (i < s->arrived_count && number < r[i].end)
        return;
    int joins_older = i < s->arrived_count && r[i].end == number;
    int joins_newer = i > 0 && r[i - 1].begin == number + 1;
    if (joins_older && joins_newer) {
        r[i - 1].begin = r[i].begin;
        ranges_move(r, &s->arrived_count, i, 1);
    } else if (joins_older) {
        r[i].end++;
    } else if (joins_newer) {
        r[i - 1].begin--;
    } else {
        if (s->arrived_count == ACK_RANGES) {
            if (i == ACK_RANGES)
                return;
            s->arrived_count--;
        }
        ranges_move(r, &s->arrived_count, i, -1);
        r[i].begin = number;
        r[i].end = number + 1;
    }
}

/* Notes that these bytes have arrived. 1; 0: all of them had before; -1: too many gaps. */
static int gaps_add(pccl_udp_stream *s, uint64_t begin, uint64_t end)
{
    range *g = s->gaps;
    if (end <= s->in_order_offset)
        return 0;
    if (begin <= s->in_order_offset) {
        unsigned joined = 0;
        while (joined < s->gaps_count && g[joined].begin <= end)
            end = pccl_max_u64(end, g[joined++].end);
        ranges_move(g, &s->gaps_count, 0, (int)joined);
        s->in_order_offset = end;
        return 1;
    }
    unsigned i = s->gaps_count;
    while (i > 0 && g[i - 1].begin > begin)
        i--;
    /* Now g[i - 1], if any, begins at or before these, and g[i] after. */
    if (i > 0 && g[i - 1].end >= end)
        return 0;
    if (i > 0 && g[i - 1].end >= begin)
        begin = g[--i].begin;
    unsigned joined = 0;
    while (i + joined < s->gaps_count && g[i + joined].begin <= end)
        end = pccl_max_u64(end, g[i + joined++].end);
    if (joined == 0) {
        if (s->gaps_count == GAPS_MAX)
            return -1;
        ranges_move(g, &s->gaps_count, i, -1);
    } else {
        ranges_move(g, &s->gaps_count, i, (int)joined - 1);
    }
    g[i].begin = begin;
    g[i].end = end;
    return 1;
}

static const char *stream_on_data(
    pccl_udp_stream *s, uint64_t number, uint64_t offset, const uint8_t *payload, size_t bytes, int64_t now_ns)
{
    uint64_t end = offset + bytes;
    if (end < offset || end > s->advertised_offset)
        return "more bytes than there is room for";
    if (bytes > 0 && end > s->in_order_offset) {
        uint64_t begin = pccl_max_u64(offset, s->in_order_offset);
        uint64_t kept_end = s->gaps_count > 0 ? s->gaps[s->gaps_count - 1].end : s->in_order_offset;
        /* Without memory, or with too many gaps, the packet is as good as lost. */
        if (ring_hold(&s->in, s->read_offset, kept_end, end) != 0)
            return NULL;
        int added = gaps_add(s, begin, end);
        if (added < 0)
            return NULL;
        if (added > 0)
            ring_put(&s->in, begin, payload + (begin - offset), (size_t)(end - begin));
        else
            s->duplicates++;
    } else if (bytes > 0) {
        s->duplicates++;
    }
    s->is_ack_urgent |= s->arrived_count > 0 && number != s->arrived[0].end;
    if (s->arrived_count == 0 || number >= s->arrived[0].end)
        s->arrived_ns = now_ns;
    arrived_add(s, number);
    if (!s->is_ack_due) {
        s->is_ack_due = 1;
        s->ack_ns = now_ns + stream_ack_delay_ns(s);
    }
    s->is_ack_urgent |= ++s->unacked_arrivals >= ACK_PACKETS || bytes == 0;
    return NULL;
}

const char *pccl_udp_stream_input(
    pccl_udp_stream *s, const uint8_t *datagram, size_t bytes, int64_t now_ns, int *is_foreign)
{
    *is_foreign = 1;
    if (bytes < HEADER_BYTES)
        return NULL;
    const uint8_t *payload = datagram + HEADER_BYTES;
    size_t payload_bytes = bytes - HEADER_BYTES;
    uint64_t expected =
        pccl_siphash_2_4(s->key_in[0], s->key_in[1], datagram + 8, HEADER_BYTES - 8, payload, payload_bytes);
    if (pccl_get_u64(datagram) != expected)
        return NULL;
    *is_foreign = 0;
    stream_count_time(s, now_ns);
    uint64_t word = pccl_get_u64(datagram + 8);
    uint64_t number = word & ((UINT64_C(1) << KIND_SHIFT) - 1);
    uint64_t offset = pccl_get_u64(datagram + 16);
    switch (word >> KIND_SHIFT) {
    case KIND_DATA: return stream_on_data(s, number, offset, payload, payload_bytes, now_ns);
    case KIND_ACK: return stream_on_ack(s, offset, payload, payload_bytes, now_ns);
    case KIND_CLOSE: s->has_ended = 1; return NULL;
    default: return "an unknown kind of packet";
    }
}

const uint8_t *pccl_udp_stream_peek(const pccl_udp_stream *s, size_t *bytes)
{
    size_t at = (size_t)s->read_offset & (s->in.size - 1);
    *bytes = (size_t)pccl_min_u64(s->in_order_offset - s->read_offset, s->in.size - at);
    return s->in.at + at;
}

void pccl_udp_stream_consume(pccl_udp_stream *s, size_t bytes)
{
    s->read_offset += bytes;
    PCCL_ASSERT(s->read_offset <= s->in_order_offset);
    if (s->read_offset + PCCL_UDP_BUFFER_BYTES_MAX - s->advertised_offset >= PCCL_UDP_BUFFER_BYTES_MAX / 4 &&
        s->arrived_count > 0) {
        s->is_ack_due = s->is_ack_urgent = 1;
        s->ack_ns = 0;
    }
}

pccl_udp_datagram pccl_udp_stream_close(pccl_udp_stream *s)
{
    pccl_udp_datagram d;
    d.payload = s->ack;
    d.payload_bytes = 0;
    header_seal(s, &d, KIND_CLOSE, 0, s->end_offset);
    return d;
}

void pccl_udp_stream_read_stats(const pccl_udp_stream *s, pccl_udp_stats *stats)
{
    *stats = s->stats;
    stats->delivered_bytes = s->delivered_bytes;
    stats->in_flight_packets = s->in_flight_packets;
    stats->acked_bytes = s->acked_offset;
    stats->unacked_bytes = s->end_offset - s->acked_offset;
    stats->unsent_bytes = s->end_offset - s->sent_offset;
    stats->rate = s->bbr.rate;
    stats->round_trip_us = s->round_trip_ns / 1000;
    stats->round_trip_us_min = s->bbr.round_trip_us;
    stats->datagram_bytes = s->datagram_bytes;
    stats->is_open = s->is_open;
    stats->has_ended = s->has_ended;
}
