/* redirect.h: included before every shipped source that is built for the simulation. What these ask of the system and
 * of its threads goes to the simulation instead (simulated.h); not a line of them is different. */
#ifndef PCCL_REDIRECT_H
#define PCCL_REDIRECT_H

#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

ssize_t pccl_sim_readv(int fd, const struct iovec *iov, int iov_count);
ssize_t pccl_sim_sendmsg(int fd, const struct msghdr *message, int flags);
int pccl_sim_close(int fd);
int pccl_sim_shutdown(int fd, int how);
int pccl_sim_bytes_under_way(int fd, int *bytes);
int pccl_sim_mutex_init(pthread_mutex_t *mutex);
int pccl_sim_mutex_lock(pthread_mutex_t *mutex);
int pccl_sim_mutex_unlock(pthread_mutex_t *mutex);
int pccl_sim_cond_signal(pthread_cond_t *cond);
int pccl_sim_join(pthread_t thread);

#ifndef PCCL_SIMULATION_ITSELF
#define readv(fd, iov, count) pccl_sim_readv(fd, iov, count)
#define sendmsg(fd, message, flags) pccl_sim_sendmsg(fd, message, flags)
#define close pccl_sim_close /* also the name of a member, which is then called so everywhere */
#define shutdown(fd, how) pccl_sim_shutdown(fd, how)
#define fcntl(fd, ...) ((void)(fd), 0)
#define setsockopt(fd, level, name, value, size) ((void)(fd), (void)(value), 0)
#define getsockopt(fd, level, name, value, size) ((void)(fd), (void)(value), (void)(size), -1)
#define getsockname(fd, address, size) ((void)(fd), (void)(address), (void)(size), -1)
#define getpeername(fd, address, size) ((void)(fd), (void)(address), (void)(size), -1)
#define ioctl(fd, request, bytes) ((request) == SIOCOUTQ ? pccl_sim_bytes_under_way(fd, bytes) : (*(bytes) = 0))
#define pthread_mutex_init(mutex, attributes) pccl_sim_mutex_init(mutex)
#define pthread_mutex_destroy(mutex) ((void)(mutex))
#define pthread_mutex_lock(mutex) pccl_sim_mutex_lock(mutex)
#define pthread_mutex_unlock(mutex) pccl_sim_mutex_unlock(mutex)
#define pthread_cond_signal(cond) pccl_sim_cond_signal(cond)
#define pthread_cond_destroy(cond) ((void)(cond))
#define pthread_join(thread, result) pccl_sim_join(thread)
#endif

#endif
