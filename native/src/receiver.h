/* receiver.h: what frames from peers do to ops. The connections (conn.h) take frames apart and call back here.
 *
 * A frame names its op by its key, and comes from the peer behind its link.
 *
 *   1. A frame for a key that is not open here is dropped, but for an announcement of an epoch that is not over, which
 *      is buffered. Nobody here wants the rest: the op with that key has ended.
 *   2. An announcement whose description differs from ours makes the op a mismatch on both sides, payload or not.
 *   3. A segment that contradicts its op or comes from the wrong peer, and anything said twice, is the peer's fault:
 *      the link fails.
 *   4. A frame whose connection is lost before all of it was there is taken back; it comes again on another one. */
#ifndef PCCL_RECEIVER_H
#define PCCL_RECEIVER_H

#include "conn.h"
#include "groups.h"
#include "open_ops.h"

typedef struct {
    pccl_conn_host host; /* whose callbacks are this file's; all else in it is the core's */
    pccl_open_ops *ops;
    const pccl_groups *groups;
} pccl_receiver;

void pccl_receiver_init(pccl_receiver *receiver, pccl_open_ops *ops, const pccl_groups *groups);

#endif
