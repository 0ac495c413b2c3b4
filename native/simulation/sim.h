/* sim.h: what the files of the simulation share. */
#ifndef PCCL_SIM_H
#define PCCL_SIM_H

#define PCCL_SIMULATION_ITSELF

#include "base.h"
#include "poller.h"
#include "redirect.h"
#include "simulated.h"

/* chance.c */
void sim_seed(uint64_t seed, int is_random);
int sim_is_random(void);
uint32_t sim_draw(uint32_t below); /* 0 where nothing is left to chance */
int sim_happens(uint32_t one_in); /* 0 there, too */

/* fibers.c */
void sim_reset_fibers(void);
int sim_current(void); /* the number of the fiber that runs; 0: none does */
void sim_wait_for_poll(pccl_poller *poller, int timeout_ms);

/* sockets.c */
enum { SIM_FD_FIRST = 1 << 19 };
void sim_reset_sockets(void);
unsigned sim_ready_for(int fd); /* PCCL_POLL_ */
int sim_carry_all(void); /* what is not blocked; nonzero if there was anything */

/* poll.c */
int sim_has_ready(const pccl_poller *poller);

#endif
