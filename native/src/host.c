#include "host.h"

#include <stdio.h>

void pccl_host_fail(pccl_conn_host *host, int system_error, const char *detail)
{
    if (host->fault.is_set)
        return;
    host->fault.is_set = 1;
    host->fault.system_error = system_error;
    snprintf(host->fault.detail, sizeof host->fault.detail, "%s", detail);
}
