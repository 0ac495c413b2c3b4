/* receiver.h: what frames from peers do to ops. The connections (conn.h) take frames apart and call back here.
 *
 * A frame names its op by its key, and comes from the peer behind its link. Peers may be early, late, wrong or hostile:
 *
 *   1. An announcement (READY, EAGER) of an op that is not open here is buffered (unexpected.h) if its epoch is not
 *      over and the op was neither aborted nor given up here, because it may still come. Any other frame for a key that
 *      is not open here is dropped, because its op has ended and is not wanted here.
 *   2. An announcement whose description differs from ours makes the op a mismatch on both sides, payload or not. The
 *      link goes on: that the two callers differ is no fault of the peer's engine.
 *   3. A segment that contradicts its op or comes from the wrong peer, and anything said twice, breaks the protocol:
 *      the link fails, because nothing else from this peer can be trusted.
 *   4. A frame whose connection is lost before all of it was there is taken back, because it comes again on another
 *      connection. */
#ifndef PCCL_RECEIVER_H
#define PCCL_RECEIVER_H

#include "conn.h"
#include "unexpected.h"
#include "open_ops.h"

typedef struct {
    pccl_conn_host host; /* whose callbacks are this file's; all else in it is the core's */
    pccl_open_ops *ops;
    const pccl_groups *groups;
} pccl_receiver;

void pccl_receiver_init(pccl_receiver *receiver, pccl_open_ops *ops, const pccl_groups *groups);

#endif
