/* signs.h: random signs from a counter-based generator; the functions are in the public header.
 *
 * The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011).
 * A 64-bit key and a 128-bit counter give 128 bits, by integer operations alone:
 *
 *     ten times: (c0, c1, c2, c3) = (high(B * c2) ^ c1 ^ k0, low(B * c2), high(A * c0) ^ c3 ^ k1, low(A * c0)),
 *                then k0 += 0x9e3779b9, k1 += 0xbb67ae85
 *
 * where A = 0xd2511f53, B = 0xcd9e8d57, high and low are the halves of the 64-bit product, and the sums wrap.
 *
 * The sign of element i of tensor t, in direction d of step s, for a seed:
 *
 *     the key is the seed's low and high half, the counter (i / 128, t, s, d);
 *     of the four words that come out, bit i % 32 of word i % 128 / 32 counts; 1 is minus.
 *
 * So signs need no memory: who knows four numbers makes them again, from anywhere in the tensor.
 */
#ifndef PCCL_SIGNS_H
#define PCCL_SIGNS_H

#include "pccl_native.h"

/* Elements that share a counter. */
enum { PCCL_SIGNS_BLOCK = 128 };

#endif
