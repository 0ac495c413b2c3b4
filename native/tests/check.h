/* check.h: a test is a void function run by RUN; a failed CHECK is printed, counted, and the test goes on. */
#ifndef PCCL_CHECK_H
#define PCCL_CHECK_H

#include <stdio.h>

/* Atomics because threads under test may CHECK too. */
static int check_failures;
static int check_tests_passed;
static int check_tests_failed;

enum { CHECK_PRINTED_MAX = 50 };

static void check_fail(const char *file, int line, const char *what)
{
    if (__atomic_add_fetch(&check_failures, 1, __ATOMIC_SEQ_CST) <= CHECK_PRINTED_MAX)
        fprintf(stderr, "%s:%d: CHECK failed: %s\n", file, line, what);
}

#define CHECK(condition) ((condition) ? (void)0 : check_fail(__FILE__, __LINE__, #condition))

/* As CHECK, with a printf message that says which case it was. */
#define CHECK_MSG(condition, ...) \
    do { \
        if (!(condition)) { \
            char check_text_[256]; \
            snprintf(check_text_, sizeof check_text_, __VA_ARGS__); \
            check_fail(__FILE__, __LINE__, check_text_); \
        } \
    } while (0)

/* For what the rest of a test cannot do without: leaves the (void) function. */
#define REQUIRE(condition) \
    do { \
        if (!(condition)) { \
            check_fail(__FILE__, __LINE__, #condition); \
            return; \
        } \
    } while (0)

#define RUN(test) \
    do { \
        int check_before_ = __atomic_load_n(&check_failures, __ATOMIC_SEQ_CST); \
        test(); \
        if (__atomic_load_n(&check_failures, __ATOMIC_SEQ_CST) == check_before_) \
            check_tests_passed++; \
        else { \
            check_tests_failed++; \
            fprintf(stderr, "FAILED %s\n", #test); \
        } \
    } while (0)

/* The last statement of main. */
static inline int check_summary(void)
{
    printf("%d passed, %d failed\n", check_tests_passed, check_tests_failed);
    return check_tests_failed != 0;
}

#endif
