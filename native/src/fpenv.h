/* fpenv.h: the floating-point environment of a thread: which way it rounds, whether it flushes subnormals, which
 * exceptions trap. Ranks get the same bits only where all compute in the same environment, which is the default: to
 * nearest and even, subnormals as they are, no traps.
 *
 * A thread begins with a copy of that of the thread that makes it, and a program may have changed that:
 * torch.set_flush_denormal does, fesetround, and the mere loading of a library that was built with -ffast-math. So the
 * engine's thread takes the default when it starts. A kernel that callers' threads run takes it and puts theirs back;
 * others in the public header are for tests, and compute in the environment of the thread that calls them. */
#ifndef PCCL_FPENV_H
#define PCCL_FPENV_H

#include "pccl_native.h"

/* Takes the default; returns what was there, for `leave`. Around a call that no compiler sees into, with its operands
 * in memory: arithmetic in the same function may be moved out from between the two. */
uint64_t pccl_fpenv_enter(void);
void pccl_fpenv_leave(uint64_t before);

#endif
