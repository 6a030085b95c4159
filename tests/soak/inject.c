/* Faults in a program's file operations: loaded before it with LD_PRELOAD.

   Counts the operations below a folder that change something, and does something at the Nth:

     count         nothing; only counts
     kill:before   SIGKILL instead of the operation
     kill:after    SIGKILL when it is done
     kill:half     SIGKILL after half of it, where it writes; after it elsewhere
     fail:ERRNO    the operation fails, once
     short         the first write from the Nth operation on writes half and says so
     full          the same, and from then on whatever needs room fails with ENOSPC

   Armed by a call of `inject_arm` in a process that was forked. The count lives in a file that is
   mapped into memory: all processes that are armed with it share one count, so that the Nth
   operation is the Nth of a launcher and its workers together, and exactly one of them meets it.

   glibc calls itself past a library that is preloaded. What C's stdio writes is therefore seen as
   fopen and fwrite, not as open and write. */

#define _GNU_SOURCE
/* With fortification, glibc's headers define some of these functions themselves. */
#undef _FORTIFY_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>
#include <utime.h>

enum { COUNT, KILL_BEFORE, KILL_AFTER, KILL_HALF, FAIL, SHORT, FULL };
/* What an operation is: a write can be cut in half, and those that need room fail on a full disk. */
enum { OTHER, GROWS, WRITES };
/* What is to be done with it. */
enum { PASS, REFUSE, HALVE, HALVE_AND_DIE, DO_AND_DIE };

/* The file that holds the count: `what` tells which operation met the fault. */
struct tally {
    _Atomic long count;
    _Atomic long fired;
    char what[PATH_MAX + 64];
};

static struct tally *tally;
static char folder[PATH_MAX];
static size_t folder_length;
static int kind, error_number;
static long at;

#define REAL(name)                                                                                 \
    static __typeof__(&name) real;                                                                 \
    if (!real)                                                                                     \
    real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static _Noreturn void die(void)
{
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

/* Returns 0, or -1 with errno set. A count that is not NULL names the file of the count. */
int inject_arm(const char *below, const char *what, int number, long nth, const char *count)
{
    static const char *const kinds[] = {"count", "kill:before", "kill:after", "kill:half",
                                        "fail",  "short",       "full"};
    int file, found = -1;
    struct tally *mapped;

    for (int i = 0; i < (int)(sizeof kinds / sizeof *kinds); i++)
        if (!strcmp(kinds[i], what))
            found = i;
    if (found < 0 || strlen(below) >= sizeof folder) {
        errno = EINVAL;
        return -1;
    }
    file = (int)syscall(SYS_openat, AT_FDCWD, count, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0)
        return -1;
    if (syscall(SYS_ftruncate, file, sizeof *tally)) {
        close(file);
        return -1;
    }
    mapped = mmap(NULL, sizeof *tally, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED)
        return -1;
    strcpy(folder, below);
    folder_length = strlen(below);
    kind = found;
    error_number = number;
    at = nth;
    tally = mapped;
    return 0;
}

void inject_disarm(void)
{
    tally = NULL;
}

/* The name that NAME means in an open folder, in full; an empty NAME is the open file itself. */
static void full_name(char *to, int at_folder, const char *name)
{
    size_t length = 0;

    if (*name != '/') {
        if (at_folder == AT_FDCWD) {
            if (syscall(SYS_getcwd, to, PATH_MAX) > 0)
                length = strlen(to);
        } else {
            char link[64];
            ssize_t n;
            snprintf(link, sizeof link, "/proc/self/fd/%d", at_folder);
            n = readlink(link, to, PATH_MAX - 1);
            length = n > 0 ? (size_t)n : 0;
        }
        if (length && *name)
            to[length++] = '/';
    }
    snprintf(to + length, PATH_MAX - length, "%s", name);
}

static int below(const char *name)
{
    return !strncmp(name, folder, folder_length)
           && (name[folder_length] == '/' || !name[folder_length]);
}

/* Counts an operation on one name or two, and says what is to become of it. */
static int meet(const char *call, int need, int first_at, const char *first, int second_at,
                const char *second)
{
    struct tally *now = tally;
    char name[PATH_MAX] = "", other[PATH_MAX] = "";
    int saved = errno;
    long number, none = 0;

    if (!now || !first)
        return PASS;
    full_name(name, first_at, first);
    if (second)
        full_name(other, second_at, second);
    errno = saved;
    if (!below(name) && !(second && below(other)))
        return PASS;
    number = atomic_fetch_add(&now->count, 1) + 1;
    if (kind == COUNT || number < at)
        return PASS;
    if (kind == FULL && atomic_load(&now->fired)) {
        errno = ENOSPC;
        return need == OTHER ? PASS : REFUSE;
    }
    if (kind == SHORT || kind == FULL ? need != WRITES : number != at)
        return PASS;
    if (!atomic_compare_exchange_strong(&now->fired, &none, number))
        return PASS;
    snprintf(now->what, sizeof now->what, "%s %s", call, name);
    switch (kind) {
    case KILL_BEFORE:
        die();
    case KILL_AFTER:
        return DO_AND_DIE;
    case KILL_HALF:
        return need == WRITES ? HALVE_AND_DIE : DO_AND_DIE;
    case FAIL:
        errno = error_number;
        return REFUSE;
    default:
        return HALVE;
    }
}

/* An operation that cannot be cut: refused, done, or the last thing this process does. */
#define WHOLE(type, failed, met, call)                                                             \
    do {                                                                                           \
        int fate_ = (met);                                                                         \
        type result_;                                                                              \
        if (fate_ == REFUSE)                                                                       \
            return failed;                                                                         \
        result_ = (call);                                                                          \
        if (fate_ != PASS)                                                                         \
            die();                                                                                 \
        return result_;                                                                            \
    } while (0)

/* An operation on SIZE bytes, in the variable SIZE. One byte has no half: nothing is written. */
#define CUT(type, failed, size, met, call)                                                         \
    do {                                                                                           \
        int fate_ = (met);                                                                         \
        type result_;                                                                              \
        if (fate_ == REFUSE)                                                                       \
            return failed;                                                                         \
        if (fate_ == HALVE && size > 1)                                                            \
            size /= 2;                                                                             \
        if (fate_ == HALVE_AND_DIE) {                                                              \
            size /= 2;                                                                             \
            if (!size)                                                                             \
                die();                                                                             \
        }                                                                                          \
        result_ = (call);                                                                          \
        if (fate_ == HALVE_AND_DIE || fate_ == DO_AND_DIE)                                         \
            die();                                                                                 \
        return result_;                                                                            \
    } while (0)

#define CHANGES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)
#define NEEDS_MODE(flags) (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE)
#define MODE(last)                                                                                 \
    mode_t mode = 0;                                                                               \
    if (NEEDS_MODE(last)) {                                                                        \
        va_list list;                                                                              \
        va_start(list, last);                                                                      \
        mode = (mode_t)va_arg(list, int);                                                          \
        va_end(list);                                                                              \
    }

#define OPEN(name)                                                                                 \
    int name(const char *path, int flags, ...)                                                     \
    {                                                                                              \
        REAL(name);                                                                                \
        MODE(flags)                                                                                \
        if (!(flags & CHANGES))                                                                    \
            return real(path, flags, mode);                                                        \
        WHOLE(int, -1, meet("open", flags & O_CREAT ? GROWS : OTHER, AT_FDCWD, path, 0, 0), \
              real(path, flags, mode));                                                            \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                               \
    int name(int dir, const char *path, int flags, ...)                                            \
    {                                                                                              \
        REAL(name);                                                                                \
        MODE(flags)                                                                                \
        if (!(flags & CHANGES))                                                                    \
            return real(dir, path, flags, mode);                                                   \
        WHOLE(int, -1, meet("open", flags & O_CREAT ? GROWS : OTHER, dir, path, 0, 0),      \
              real(dir, path, flags, mode));                                                       \
    }
OPENAT(openat)
OPENAT(openat64)

/* What a program calls that was built with fortification. */
int __open_2(const char *path, int flags) { return open(path, flags); }
int __open64_2(const char *path, int flags) { return open64(path, flags); }
int __openat_2(int dir, const char *path, int flags) { return openat(dir, path, flags); }
int __openat64_2(int dir, const char *path, int flags) { return openat64(dir, path, flags); }

#define CREAT(name)                                                                                \
    int name(const char *path, mode_t mode)                                                        \
    {                                                                                              \
        REAL(name);                                                                                \
        WHOLE(int, -1, meet("open", GROWS, AT_FDCWD, path, 0, 0), real(path, mode));        \
    }
CREAT(creat)
CREAT(creat64)

#define FOPEN(name)                                                                                \
    FILE *name(const char *path, const char *mode)                                                 \
    {                                                                                              \
        REAL(name);                                                                                \
        if (*mode == 'r' && !strchr(mode, '+'))                                                    \
            return real(path, mode);                                                               \
        WHOLE(FILE *, NULL, meet("fopen", GROWS, AT_FDCWD, path, 0, 0), real(path, mode));  \
    }
FOPEN(fopen)
FOPEN(fopen64)

size_t fwrite(const void *data, size_t size, size_t n, FILE *file)
{
    REAL(fwrite);
    if (!tally)
        return real(data, size, n, file);
    CUT(size_t, 0, n, meet("fwrite", WRITES, fileno(file), "", 0, 0), real(data, size, n, file));
}

ssize_t write(int file, const void *data, size_t size)
{
    REAL(write);
    CUT(ssize_t, -1, size, meet("write", WRITES, file, "", 0, 0), real(file, data, size));
}

#define PWRITE(name, type)                                                                         \
    ssize_t name(int file, const void *data, size_t size, type offset)                             \
    {                                                                                              \
        REAL(name);                                                                                \
        CUT(ssize_t, -1, size, meet("write", WRITES, file, "", 0, 0),                              \
            real(file, data, size, offset));                                                       \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

/* Cut between its parts. */
ssize_t writev(int file, const struct iovec *parts, int n)
{
    REAL(writev);
    CUT(ssize_t, -1, n, meet("write", WRITES, file, "", 0, 0), real(file, parts, n));
}

#define SENDFILE(name, type)                                                                       \
    ssize_t name(int to, int from, type *offset, size_t size)                                      \
    {                                                                                              \
        REAL(name);                                                                                \
        struct stat found;                                                                         \
        /* A program asks for more than there is; half of that would be all. */                    \
        if (tally && !fstat(from, &found) && (size_t)found.st_size < size)                         \
            size = (size_t)found.st_size;                                                          \
        CUT(ssize_t, -1, size, meet("sendfile", WRITES, to, "", 0, 0),                             \
            real(to, from, offset, size));                                                         \
    }
SENDFILE(sendfile, off_t)
SENDFILE(sendfile64, off64_t)

ssize_t copy_file_range(int from, off64_t *from_offset, int to, off64_t *to_offset, size_t size,
                        unsigned flags)
{
    REAL(copy_file_range);
    CUT(ssize_t, -1, size, meet("copy_file_range", WRITES, to, "", 0, 0),
        real(from, from_offset, to, to_offset, size, flags));
}

#define ON_FILE(name)                                                                              \
    int name(int file)                                                                             \
    {                                                                                              \
        REAL(name);                                                                                \
        WHOLE(int, -1, meet(#name, OTHER, file, "", 0, 0), real(file));                     \
    }
ON_FILE(fsync)
ON_FILE(fdatasync)

#define FTRUNCATE(name, type)                                                                      \
    int name(int file, type size)                                                                  \
    {                                                                                              \
        REAL(name);                                                                                \
        WHOLE(int, -1, meet("truncate", OTHER, file, "", 0, 0), real(file, size));          \
    }
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

#define TRUNCATE(name, type)                                                                       \
    int name(const char *path, type size)                                                          \
    {                                                                                              \
        REAL(name);                                                                                \
        WHOLE(int, -1, meet("truncate", OTHER, AT_FDCWD, path, 0, 0), real(path, size));    \
    }
TRUNCATE(truncate, off_t)
TRUNCATE(truncate64, off64_t)

#define ON_PATH(name, need, parameters, ...)                                                       \
    int name parameters                                                                            \
    {                                                                                              \
        REAL(name);                                                                                \
        WHOLE(int, -1, meet(#name, need, AT_FDCWD, path, 0, 0), real(__VA_ARGS__));          \
    }
ON_PATH(unlink, OTHER, (const char *path), path)
ON_PATH(rmdir, OTHER, (const char *path), path)
ON_PATH(mkdir, GROWS, (const char *path, mode_t mode), path, mode)
ON_PATH(utime, OTHER, (const char *path, const struct utimbuf *times), path, times)
ON_PATH(utimes, OTHER, (const char *path, const struct timeval times[2]), path, times)

int unlinkat(int dir, const char *path, int flags)
{
    REAL(unlinkat);
    WHOLE(int, -1, meet("unlink", OTHER, dir, path, 0, 0), real(dir, path, flags));
}

int mkdirat(int dir, const char *path, mode_t mode)
{
    REAL(mkdirat);
    WHOLE(int, -1, meet("mkdir", GROWS, dir, path, 0, 0), real(dir, path, mode));
}

int utimensat(int dir, const char *path, const struct timespec times[2], int flags)
{
    REAL(utimensat);
    WHOLE(int, -1, meet("utime", OTHER, dir, path, 0, 0),
          real(dir, path, times, flags));
}

int futimens(int file, const struct timespec times[2])
{
    REAL(futimens);
    WHOLE(int, -1, meet("utime", OTHER, file, "", 0, 0), real(file, times));
}

#define TWO_PATHS(name, need)                                                                      \
    int name(const char *old, const char *new)                                                     \
    {                                                                                              \
        REAL(name);                                                                                \
        WHOLE(int, -1, meet(#name, need, AT_FDCWD, old, AT_FDCWD, new), real(old, new));     \
    }
TWO_PATHS(rename, OTHER)
TWO_PATHS(link, GROWS)

int symlink(const char *to, const char *path)
{
    REAL(symlink);
    WHOLE(int, -1, meet("symlink", GROWS, AT_FDCWD, path, 0, 0), real(to, path));
}

int renameat(int old_dir, const char *old, int new_dir, const char *new)
{
    REAL(renameat);
    WHOLE(int, -1, meet("rename", OTHER, old_dir, old, new_dir, new),
          real(old_dir, old, new_dir, new));
}

int renameat2(int old_dir, const char *old, int new_dir, const char *new, unsigned flags)
{
    REAL(renameat2);
    WHOLE(int, -1, meet("rename", OTHER, old_dir, old, new_dir, new),
          real(old_dir, old, new_dir, new, flags));
}

int linkat(int old_dir, const char *old, int new_dir, const char *new, int flags)
{
    REAL(linkat);
    WHOLE(int, -1, meet("link", GROWS, old_dir, old, new_dir, new),
          real(old_dir, old, new_dir, new, flags));
}
