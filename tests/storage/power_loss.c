/* Logs what a process does to files below POWER_ROOT, for a replay of a power loss.
 *
 * Preloaded with LD_PRELOAD. Each record in POWER_LOG is: operation (a letter), offset, length and the
 * lengths of two paths as five 64-bit numbers, the paths, and for a write its bytes:
 *   w write   s sync   t truncate   a allocate   p punch a hole   r rename   u unlink
 * A record is appended after the call has succeeded, by one writev, so that the log is in an order in
 * which the calls may have reached the device. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PATH_BYTES = 512, PIECES = 64 };
static int log_fd = -1;
static char root[PATH_BYTES];
static ssize_t (*real_writev)(int, const struct iovec *, int);

__attribute__((constructor)) static void start(void) {
    const char *log = getenv("POWER_LOG"), *below = getenv("POWER_ROOT");
    real_writev = dlsym(RTLD_NEXT, "writev");
    if (!log || !below) return;
    snprintf(root, sizeof root, "%s/", below);
    log_fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int is_below(const char *path) { return log_fd >= 0 && !strncmp(path, root, strlen(root)); }

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_BYTES - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_below(path);
}

static void record(char what, const char *path, const char *other, uint64_t offset, uint64_t length,
                   const struct iovec *pieces, int count) {
    uint64_t head[5] = {what, offset, length, strlen(path), strlen(other)};
    struct iovec all[3 + PIECES] = {{head, sizeof head}, {(void *)path, head[3]}, {(void *)other, head[4]}};
    uint64_t left = pieces ? length : 0;
    int used = 3;
    for (int i = 0; i < count && left && used < 3 + PIECES; i++, used++) {
        all[used] = pieces[i];
        if (all[used].iov_len > left) all[used].iov_len = left;
        left -= all[used].iov_len;
    }
    if (left || real_writev(log_fd, all, used) < 0) abort(); /* an incomplete log proves nothing */
}

static void record_fd(char what, int fd, uint64_t offset, uint64_t length, const struct iovec *pieces,
                      int count) {
    char path[PATH_BYTES];
    if (path_of(fd, path)) record(what, path, "", offset, length, pieces, count);
}

#define REAL(name) __typeof__(&name) real = dlsym(RTLD_NEXT, #name)
#define PWRITE(name, type)                                                      \
    ssize_t name(int fd, const void *data, size_t size, type offset) {          \
        REAL(name);                                                             \
        ssize_t done = real(fd, data, size, offset);                            \
        struct iovec piece = {(void *)data, size};                              \
        if (done > 0) record_fd('w', fd, offset, done, &piece, 1);              \
        return done;                                                            \
    }
#define PWRITEV(name, type)                                                     \
    ssize_t name(int fd, const struct iovec *pieces, int count, type offset) {  \
        REAL(name);                                                             \
        ssize_t done = real(fd, pieces, count, offset);                         \
        if (done > 0) record_fd('w', fd, offset, done, pieces, count);          \
        return done;                                                            \
    }
#define PWRITEV2(name, type)                                                              \
    ssize_t name(int fd, const struct iovec *pieces, int count, type offset, int flags) { \
        REAL(name);                                                                       \
        ssize_t done = real(fd, pieces, count, offset, flags);                            \
        if (done > 0) record_fd('w', fd, offset, done, pieces, count);                    \
        return done;                                                                      \
    }
#define SYNC(name)                                     \
    int name(int fd) {                                 \
        REAL(name);                                    \
        int failed = real(fd);                         \
        if (!failed) record_fd('s', fd, 0, 0, NULL, 0); \
        return failed;                                 \
    }
#define TRUNCATE(name, type)                                \
    int name(int fd, type length) {                         \
        REAL(name);                                         \
        int failed = real(fd, length);                      \
        if (!failed) record_fd('t', fd, length, 0, NULL, 0); \
        return failed;                                      \
    }
#define ALLOCATE(name, type)                                      \
    int name(int fd, type offset, type length) {                  \
        REAL(name);                                               \
        int failed = real(fd, offset, length);                    \
        if (!failed) record_fd('a', fd, offset, length, NULL, 0); \
        return failed;                                            \
    }

PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)
PWRITEV2(pwritev2, off_t)
PWRITEV2(pwritev64v2, off64_t)
SYNC(fsync)
SYNC(fdatasync)
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

int fallocate(int fd, int mode, off_t offset, off_t length) {
    REAL(fallocate);
    int failed = real(fd, mode, offset, length);
    if (!failed) record_fd(mode & FALLOC_FL_PUNCH_HOLE ? 'p' : 'a', fd, offset, length, NULL, 0);
    return failed;
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    ssize_t done = real(fd, data, size);
    struct iovec piece = {(void *)data, size};
    if (done > 0 && log_fd >= 0) {
        off_t end = lseek(fd, 0, SEEK_CUR);
        if (end >= done) record_fd('w', fd, end - done, done, &piece, 1);
    }
    return done;
}

ssize_t writev(int fd, const struct iovec *pieces, int count) {
    ssize_t done = real_writev(fd, pieces, count);
    if (done > 0 && log_fd >= 0) {
        off_t end = lseek(fd, 0, SEEK_CUR);
        if (end >= done) record_fd('w', fd, end - done, done, pieces, count);
    }
    return done;
}

int rename(const char *old, const char *new) {
    REAL(rename);
    int failed = real(old, new);
    if (!failed && is_below(old)) record('r', old, new, 0, 0, NULL, 0);
    return failed;
}

int unlink(const char *path) {
    REAL(unlink);
    int failed = real(path);
    if (!failed && is_below(path)) record('u', path, "", 0, 0, NULL, 0);
    return failed;
}
