/* Allocations, and handles by which other processes open them.

   A block is a memfd; its address is where this process maps it. It has no name anywhere: an importer opens it through
   /proc/<pid>/fd/<number> of the exporter, which must live at that moment, and afterwards keeps it alive by itself. */
#include "fake.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

Block *blocks;
Allocation *allocations;

#define MAGIC "fakecuda"
typedef struct {
  char magic[8];
  CUuuid uuid;
  uint64_t pid_namespace, serial, nbytes;
  int32_t pid, fd;
} Handle;
_Static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle), "a handle is 64 bytes");

static uint64_t pid_namespace(void) {
  struct stat info;
  return stat("/proc/self/ns/pid", &info) ? 0 : info.st_ino;
}

Block *block_of(CUdeviceptr address, size_t nbytes) {
  char *at = (char *)(uintptr_t)address;
  for (Block *block = blocks; block; block = block->next)
    if (at >= block->base && at < block->base + block->nbytes)
      return nbytes <= (size_t)(block->base + block->nbytes - at) ? block : NULL;
  return NULL;
}

Block *map_block(Device *device, int fd, size_t nbytes, uint64_t serial, bool imported) {
  char *base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) return NULL;
  madvise(base, nbytes, MADV_DONTFORK);
  Block *block = calloc(1, sizeof *block);
  *block = (Block){.next = blocks, .device = device, .base = base, .nbytes = nbytes, .serial = serial, .fd = fd,
                   .imported = imported, .charge_fd = -1};
  return blocks = block;
}

void drop_block(Block *block, bool poison) {
  if (poison) memset(block->base, POISON, block->nbytes);
  munmap(block->base, block->nbytes);
  close(block->fd);
  if (block->charge_fd >= 0) close(block->charge_fd);
  for (Block **at = &blocks; *at; at = &(*at)->next)
    if (*at == block) {
      *at = block->next;
      break;
    }
  free(block);
}

void drop_device_memory(Device *device) {
  for (Allocation **at = &allocations; *at;) {
    Allocation *allocation = *at;
    if (allocation->block->device != device) {
      at = &allocation->next;
      continue;
    }
    *at = allocation->next;
    free(allocation);
  }
  for (Block *block = blocks, *next; block; block = next) {
    next = block->next;
    /* Not poisoned: a process that ends leaves the bytes to its importers. */
    if (block->device == device) drop_block(block, false);
  }
}

static Block *new_block(Device *device, size_t nbytes) {
  uint64_t serial;
  if (getrandom(&serial, sizeof serial, 0) != sizeof serial) return NULL;
  int charge_fd = charge(device, serial, nbytes, true);
  if (charge_fd < 0) return NULL;
  char name[48];
  snprintf(name, sizeof name, "fakecuda-%016" PRIx64, serial);
  int fd = memfd_create(name, MFD_CLOEXEC);
  Block *block = fd >= 0 && !ftruncate(fd, (off_t)nbytes) ? map_block(device, fd, nbytes, serial, false) : NULL;
  if (!block) {
    if (fd >= 0) close(fd);
    close(charge_fd);
    return NULL;
  }
  block->charge_fd = charge_fd;
  return block;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes) {
  ENTER(true);
  if (!nbytes) LEAVE(INVALID_VALUE);
  size_t aligned = (nbytes + 511) & ~(size_t)511;
  Block *block = NULL;
  if (aligned < GRANULE) {
    for (block = blocks; block; block = block->next)
      if (block->shared && block->device == current && block->used + aligned <= block->nbytes) break;
    if (!block && (block = new_block(current, GRANULE))) block->shared = true;
  } else {
    block = new_block(current, (nbytes + GRANULE - 1) & ~(GRANULE - 1));
  }
  if (!block) LEAVE(OUT_OF_MEMORY);
  Allocation *allocation = calloc(1, sizeof *allocation);
  *allocation = (Allocation){allocations, block, block->base + block->used, nbytes};
  allocations = allocation;
  block->used += aligned;
  block->num_users++;
  *address = (uintptr_t)allocation->address;
  LEAVE(SUCCESS);
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  ENTER(true);
  for (Allocation **at = &allocations; *at; at = &(*at)->next) {
    Allocation *allocation = *at;
    if ((uintptr_t)allocation->address != address) continue;
    run_everything(allocation->block->device);
    *at = allocation->next;
    memset(allocation->address, POISON, allocation->nbytes);
    if (!--allocation->block->num_users) drop_block(allocation->block, true);
    free(allocation);
    LEAVE(SUCCESS);
  }
  LEAVE(INVALID_VALUE);
}

CUresult cuMemGetInfo_v2(size_t *free_nbytes, size_t *total_nbytes) {
  ENTER(true);
  size_t taken = charged(current);
  *total_nbytes = current->total_nbytes;
  *free_nbytes = taken < current->total_nbytes ? current->total_nbytes - taken : 0;
  LEAVE(SUCCESS);
}

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
  ENTER(true);
  if (!block_of(address, 1)) LEAVE(INVALID_VALUE);
  switch (attribute) {
    case 2: *(unsigned *)value = 2; break;                          /* MEMORY_TYPE: device */
    case 4: *(void **)value = (void *)(uintptr_t)address; break;    /* HOST_POINTER: here the CPU can touch it */
    default: LEAVE(INVALID_VALUE);
  }
  LEAVE(SUCCESS);
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address) {
  ENTER(true);
  Block *block = block_of(address, 1);
  if (!block || block->imported) LEAVE(INVALID_VALUE);
  Handle handle = {.uuid = block->device->uuid, .pid_namespace = pid_namespace(), .serial = block->serial,
                   .nbytes = block->nbytes, .pid = getpid(), .fd = block->fd};
  memcpy(handle.magic, MAGIC, sizeof handle.magic);
  memset(out, 0, sizeof *out);
  memcpy(out, &handle, sizeof handle);
  LEAVE(SUCCESS);
}

/* The exporter's memfd, and nothing else that has its number by now. */
static int open_exported(const Handle *handle) {
  char path[64], found[64] = "", expected[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
  snprintf(expected, sizeof expected, "/memfd:fakecuda-%016" PRIx64, handle->serial);
  if (readlink(path, found, sizeof found - 1) < 0 || strncmp(found, expected, strlen(expected))) return -1;
  int fd = open(path, O_RDWR | O_CLOEXEC);
  struct stat info;
  if (fd >= 0 && (fstat(fd, &info) || (uint64_t)info.st_size != handle->nbytes)) {
    close(fd);
    return -1;
  }
  return fd;
}

/* No two cards here can read each other's memory, as a P40 and an RTX 3050 cannot. */
static CUresult refused_on_another_card(const CUuuid *uuid) {
  for (int i = 0; i < num_devices; i++)
    if (!memcmp(&devices[i].uuid, uuid, sizeof *uuid)) return PEER_ACCESS_UNSUPPORTED;
  return INVALID_DEVICE;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle raw, unsigned flags) {
  ENTER(true);
  Handle handle;
  memcpy(&handle, &raw, sizeof handle);
  if (flags != 1 || memcmp(handle.magic, MAGIC, sizeof handle.magic)) LEAVE(INVALID_VALUE);
  if (handle.pid_namespace != pid_namespace() || handle.pid == getpid()) LEAVE(INVALID_CONTEXT);
  if (memcmp(&handle.uuid, &current->uuid, sizeof handle.uuid)) LEAVE(refused_on_another_card(&handle.uuid));
  for (Block *block = blocks; block; block = block->next)
    if (block->imported && block->serial == handle.serial) {
      block->num_users++;
      *address = (uintptr_t)block->base;
      LEAVE(SUCCESS);
    }
  int fd = open_exported(&handle);
  if (fd < 0) LEAVE(INVALID_HANDLE);
  Block *block = map_block(current, fd, handle.nbytes, handle.serial, true);
  if (!block) {
    close(fd);
    LEAVE(OUT_OF_MEMORY);
  }
  block->num_users = 1;
  block->charge_fd = charge(current, handle.serial, handle.nbytes, false);
  *address = (uintptr_t)block->base;
  LEAVE(SUCCESS);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  ENTER(true);
  for (Block *block = blocks; block; block = block->next)
    if (block->imported && (uintptr_t)block->base == address) {
      run_everything(block->device);
      if (!--block->num_users) drop_block(block, false);
      LEAVE(SUCCESS);
    }
  LEAVE(INVALID_VALUE);
}
