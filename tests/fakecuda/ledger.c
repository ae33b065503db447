/* How much of a card is taken, by all processes together, and right even when one is killed.

   Each process that holds a block holds a shared flock on an empty file of the state folder whose name says card, serial
   and size. The kernel drops the lock with the process. A file that nobody locks counts nothing and is removed by whoever
   looks next. Opening the ledger itself is serialised by an exclusive flock on "ledger". */
#include "fake.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

static int open_ledger(void) {
  char path[4200];
  snprintf(path, sizeof path, "%s/ledger", state_folder());
  int fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0666);
  if (fd >= 0) flock(fd, LOCK_EX);
  return fd;
}

/* With the ledger locked: the sum of what is held, dead files removed. Each serial counts once. */
static size_t sum(Device *device) {
  DIR *folder = opendir(state_folder());
  if (!folder) return 0;
  size_t total = 0;
  struct dirent *entry;
  while ((entry = readdir(folder))) {
    int physical;
    uint64_t serial;
    size_t nbytes;
    if (sscanf(entry->d_name, "held.%d.%" SCNx64 ".%zu", &physical, &serial, &nbytes) != 3) continue;
    int fd = openat(dirfd(folder), entry->d_name, O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    if (!flock(fd, LOCK_EX | LOCK_NB))
      unlinkat(dirfd(folder), entry->d_name, 0);
    else if (physical == device->physical)
      total += nbytes;
    close(fd);
  }
  closedir(folder);
  return total;
}

size_t charged(Device *device) {
  int ledger = open_ledger();
  size_t total = sum(device);
  if (ledger >= 0) close(ledger);
  return total;
}

/* A descriptor that holds the charge while it is open in any process, or -1. */
int charge(Device *device, uint64_t serial, size_t nbytes, bool check) {
  int ledger = open_ledger();
  if (ledger < 0) return -1;
  int fd = -1;
  if (!check || sum(device) + nbytes <= device->total_nbytes) {
    char path[4300];
    snprintf(path, sizeof path, "%s/held.%d.%016" PRIx64 ".%zu", state_folder(), device->physical, serial, nbytes);
    fd = open(path, O_CREAT | O_RDONLY | O_CLOEXEC, 0666);
    if (fd >= 0) flock(fd, LOCK_SH);
  }
  close(ledger);
  return fd;
}
