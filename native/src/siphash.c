#include "siphash.h"

#include "base.h"

typedef struct {
    uint64_t v0, v1, v2, v3;
} sip_state;

static uint64_t rotate(uint64_t x, unsigned bits) { return x << bits | x >> (64 - bits); }

static void sip_round(sip_state *s)
{
    s->v0 += s->v1;
    s->v1 = rotate(s->v1, 13) ^ s->v0;
    s->v0 = rotate(s->v0, 32);
    s->v2 += s->v3;
    s->v3 = rotate(s->v3, 16) ^ s->v2;
    s->v0 += s->v3;
    s->v3 = rotate(s->v3, 21) ^ s->v0;
    s->v2 += s->v1;
    s->v1 = rotate(s->v1, 17) ^ s->v2;
    s->v2 = rotate(s->v2, 32);
}

static sip_state sip_begin(uint64_t key_0, uint64_t key_1)
{
    sip_state s = {key_0 ^ UINT64_C(0x736f6d6570736575), key_1 ^ UINT64_C(0x646f72616e646f6d),
        key_0 ^ UINT64_C(0x6c7967656e657261), key_1 ^ UINT64_C(0x7465646279746573)};
    return s;
}

static void sip_take(sip_state *s, uint64_t word)
{
    s->v3 ^= word;
    sip_round(s);
    s->v0 ^= word;
}

static void sip_take_twice(sip_state *s, uint64_t word)
{
    s->v3 ^= word;
    sip_round(s);
    sip_round(s);
    s->v0 ^= word;
}

static uint64_t sip_end(sip_state *s, int rounds)
{
    s->v2 ^= 0xff;
    for (int i = 0; i < rounds; i++)
        sip_round(s);
    return s->v0 ^ s->v1 ^ s->v2 ^ s->v3;
}

uint64_t pccl_siphash_1_3(uint64_t key_0, uint64_t key_1, const uint64_t *words, size_t count)
{
    sip_state s = sip_begin(key_0, key_1);
    for (size_t i = 0; i < count; i++)
        sip_take(&s, words[i]);
    sip_take(&s, (uint64_t)count * sizeof *words << 56);
    return sip_end(&s, 3);
}

uint64_t pccl_siphash_2_4(
    uint64_t key_0, uint64_t key_1, const uint8_t *head, size_t head_bytes, const uint8_t *rest, size_t rest_bytes)
{
    sip_state s = sip_begin(key_0, key_1);
    for (size_t i = 0; i < head_bytes; i += 8)
        sip_take_twice(&s, pccl_get_u64(head + i));
    size_t whole_bytes = rest_bytes / 8 * 8;
    for (size_t i = 0; i < whole_bytes; i += 8)
        sip_take_twice(&s, pccl_get_u64(rest + i));
    uint64_t last = (uint64_t)(head_bytes + rest_bytes) << 56;
    for (size_t i = whole_bytes; i < rest_bytes; i++)
        last |= (uint64_t)rest[i] << 8 * (i - whole_bytes);
    sip_take_twice(&s, last);
    return sip_end(&s, 4);
}
