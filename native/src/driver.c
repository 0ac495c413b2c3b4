#include "driver.h"

#include "os.h"

#include <string.h>

enum { REST_MS = 1 };

#define REST_NS (REST_MS * INT64_C(1000000))

int pccl_driver_init(pccl_driver *driver)
{
    memset(driver, 0, sizeof *driver);
    driver->called_ns = INT64_MIN / 2;
    int rc = pthread_mutex_init(&driver->mutex, NULL);
    if (rc != 0)
        return rc;
    rc = pccl_cond_init(&driver->changed);
    if (rc != 0)
        pthread_mutex_destroy(&driver->mutex);
    return rc;
}

void pccl_driver_free(pccl_driver *driver)
{
    pthread_cond_destroy(&driver->changed);
    pthread_mutex_destroy(&driver->mutex);
}

void pccl_driver_need(pccl_driver *driver)
{
    pthread_mutex_lock(&driver->mutex);
    driver->is_needed = 1;
    if (driver->driving == PCCL_DRIVEN_BY_NOBODY)
        pthread_cond_signal(&driver->changed);
    pthread_mutex_unlock(&driver->mutex);
}

int pccl_driver_take(pccl_driver *driver)
{
    int64_t now_ns = pccl_now_ns();
    pthread_mutex_lock(&driver->mutex);
    int is_free = driver->driving == PCCL_DRIVEN_BY_NOBODY && !driver->is_needed;
    if (is_free)
        driver->driving = PCCL_DRIVEN_BY_CALLER;
    driver->called_ns = now_ns;
    pthread_mutex_unlock(&driver->mutex);
    return is_free;
}

void pccl_driver_leave(pccl_driver *driver, int is_idle)
{
    int64_t now_ns = pccl_now_ns();
    pthread_mutex_lock(&driver->mutex);
    driver->driving = PCCL_DRIVEN_BY_NOBODY;
    driver->called_ns = now_ns;
    driver->is_needed |= !is_idle;
    if (driver->is_needed)
        pthread_cond_signal(&driver->changed);
    pthread_mutex_unlock(&driver->mutex);
}

void pccl_driver_rest(pccl_driver *driver)
{
    int64_t now_ns = pccl_now_ns();
    pthread_mutex_lock(&driver->mutex);
    driver->driving = PCCL_DRIVEN_BY_NOBODY;
    while (driver->driving == PCCL_DRIVEN_BY_CALLER || (!driver->is_needed && now_ns - driver->called_ns < REST_NS)) {
        int is_calling = driver->driving == PCCL_DRIVEN_BY_CALLER;
        (void)pccl_cond_wait(&driver->changed, &driver->mutex, (is_calling ? now_ns : driver->called_ns) + REST_NS);
        now_ns = pccl_now_ns();
    }
    driver->driving = PCCL_DRIVEN_BY_THREAD;
    driver->is_needed = 0;
    pthread_mutex_unlock(&driver->mutex);
}
