/* Preloaded into a process, it sees what the process does to the files of one folder.

   DISK_FOLDER      the folder, as an absolute path without links
   DISK_LOG         a file elsewhere; each call is added to it when it is done: kind, length of the name, offset, length, name, data
   disk_kill_at(n)  the process kills itself at the nth call from now, a write half done

   Kinds: W write, S sync, T truncate (to offset), U unlink. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct __attribute__((packed)) record {
  char kind;
  uint16_t name_length;
  int64_t offset, length;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* held over a call and its record: their orders are one */
static int log_file = -1;
static long calls_left = -1;

/* The name of a file of the folder without the folder; NULL for any other path. */
static const char *name_in_folder(const char *path) {
  const char *folder = getenv("DISK_FOLDER");
  size_t length = folder ? strlen(folder) : 0;
  return length && !strncmp(path, folder, length) && path[length] == '/' ? path + length + 1 : NULL;
}

static const char *name_of(int fd, char path[PATH_MAX]) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, PATH_MAX - 1);
  if (length < 0) return NULL;
  path[length] = 0;
  return name_in_folder(path);
}

static void put(const void *data, size_t length) {
  while (length) {
    ssize_t done = syscall(SYS_write, log_file, data, length);
    if (done <= 0) abort();
    data = (const char *)data + done;
    length -= done;
  }
}

static void note(char kind, const char *name, int64_t offset, const void *data, int64_t length) {
  const char *path = getenv("DISK_LOG");
  if (!path) return;
  if (log_file < 0) log_file = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  struct record record = {kind, strlen(name), offset, data ? length : 0};
  put(&record, sizeof record);
  put(name, record.name_length);
  put(data, record.length);
}

/* Whether this is the call to die at. */
static int is_last(void) { return calls_left > 0 && --calls_left == 0; }

void disk_kill_at(long n) { calls_left = n; }

static ssize_t write_at(int fd, const void *data, size_t length, int64_t offset, int at_offset) {
  char path[PATH_MAX];
  const char *name = name_of(fd, path);
  if (!name) return at_offset ? syscall(SYS_pwrite64, fd, data, length, offset) : syscall(SYS_write, fd, data, length);
  pthread_mutex_lock(&lock);
  if (!at_offset) offset = lseek(fd, 0, SEEK_CUR);
  int dies = is_last();
  if (dies) length /= 2;
  ssize_t done = at_offset ? syscall(SYS_pwrite64, fd, data, length, offset) : syscall(SYS_write, fd, data, length);
  if (dies) kill(getpid(), SIGKILL);
  if (done > 0) note('W', name, offset, data, done);
  pthread_mutex_unlock(&lock);
  return done;
}

static int on_file(char kind, long number, int fd, int64_t offset) {
  char path[PATH_MAX];
  const char *name = name_of(fd, path);
  if (!name) return syscall(number, fd, offset);
  pthread_mutex_lock(&lock);
  if (is_last()) kill(getpid(), SIGKILL);
  int result = syscall(number, fd, offset);
  if (!result) note(kind, name, offset, NULL, 0);
  pthread_mutex_unlock(&lock);
  return result;
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { return write_at(fd, data, length, offset, 1); }
ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) { return write_at(fd, data, length, offset, 1); }
ssize_t write(int fd, const void *data, size_t length) { return write_at(fd, data, length, 0, 0); }
int fsync(int fd) { return on_file('S', SYS_fsync, fd, 0); }
int fdatasync(int fd) { return on_file('S', SYS_fdatasync, fd, 0); }
int ftruncate(int fd, off_t length) { return on_file('T', SYS_ftruncate, fd, length); }
int ftruncate64(int fd, off64_t length) { return on_file('T', SYS_ftruncate, fd, length); }

int unlink(const char *path) {
  const char *name = name_in_folder(path);
  if (!name) return syscall(SYS_unlinkat, AT_FDCWD, path, 0);
  pthread_mutex_lock(&lock);
  if (is_last()) kill(getpid(), SIGKILL);
  int result = syscall(SYS_unlinkat, AT_FDCWD, path, 0);
  if (!result) note('U', name, 0, NULL, 0);
  pthread_mutex_unlock(&lock);
  return result;
}
