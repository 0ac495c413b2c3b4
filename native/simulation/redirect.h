/* redirect.h: included before every shipped source that is built for the simulation. Its threads and
 * locks are those of the simulation (simulated.h); not a line of it is different. */
#ifndef PCCL_REDIRECT_H
#define PCCL_REDIRECT_H

#include <pthread.h>

int pccl_sim_mutex_init(pthread_mutex_t *mutex);
int pccl_sim_mutex_lock(pthread_mutex_t *mutex);
int pccl_sim_mutex_unlock(pthread_mutex_t *mutex);
int pccl_sim_cond_signal(pthread_cond_t *cond);
int pccl_sim_join(pthread_t thread);

#ifndef PCCL_SIMULATION_ITSELF
#define pthread_mutex_init(mutex, attributes) pccl_sim_mutex_init(mutex)
#define pthread_mutex_destroy(mutex) ((void)(mutex))
#define pthread_mutex_lock(mutex) pccl_sim_mutex_lock(mutex)
#define pthread_mutex_unlock(mutex) pccl_sim_mutex_unlock(mutex)
#define pthread_cond_signal(cond) pccl_sim_cond_signal(cond)
#define pthread_cond_destroy(cond) ((void)(cond))
#define pthread_join(thread, result) pccl_sim_join(thread)
#endif

#endif
