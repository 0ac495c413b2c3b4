/* ending.c: a process that ends as its last signal would have ended it, after everything else. */
#include "pccl_native.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

static volatile sig_atomic_t ending;

static void end_by_signal(void)
{
    const int number = ending;
    sigset_t it;
    fflush(NULL);
    signal(number, SIG_DFL);
    sigemptyset(&it);
    sigaddset(&it, number);
    sigprocmask(SIG_UNBLOCK, &it, NULL);
    raise(number);
}

int pccl_end_by_signal(int number)
{
    if (number <= 0)
        return PCCL_E_INVALID;
    if (ending == 0 && atexit(end_by_signal) != 0)
        return PCCL_E_MEMORY;
    ending = number;
    return PCCL_OK;
}
