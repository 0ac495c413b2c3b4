#include "base.h"

#include <stdio.h>
#include <stdlib.h>

void pccl_assert_failed(const char *condition, const char *file, int line, const char *function)
{
    fprintf(stderr, "pccl: %s:%d: %s: broken invariant: %s\n", file, line, function, condition);
    fflush(stderr);
    abort();
}
