/* A driver without a card: what the files of this folder share. Device memory is memfds, so processes really share it. */
#ifndef FAKE_H
#define FAKE_H
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct { unsigned char bytes[16]; } CUuuid;
typedef struct { unsigned char reserved[64]; } CUipcMemHandle;

enum {
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201, PEER_ACCESS_UNSUPPORTED = 217, INVALID_HANDLE = 400, ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713
};

#define MAX_DEVICES 8
#define GRANULE ((size_t)2 << 20)
#define POISON 0xDB

typedef struct Device {
  char name[96];
  CUuuid uuid;
  size_t total_nbytes;
  int major, minor, display;
  int physical; /* its number on the machine; its ordinal is its place in `devices` */
  int retained;
  CUresult lost; /* sticky: every later call on its context answers this */
  struct Stream *default_stream;
} Device;
typedef Device *CUcontext;

/* One memfd: an allocation of ours, the shared block of small ones, or another process's that we opened. */
typedef struct Block {
  struct Block *next;
  Device *device;
  char *base;
  size_t nbytes;
  uint64_t serial;
  int fd, charge_fd;
  bool imported, shared;
  int num_users; /* opens of an import, small allocations of a shared block */
  size_t used;
} Block;

/* What cuMemAlloc gave: a whole block, or a part of a shared one. */
typedef struct Allocation {
  struct Allocation *next;
  Block *block;
  char *address;
  size_t nbytes;
} Allocation;

enum { TO_DEVICE, TO_HOST, WITHIN_DEVICE, FILL };

typedef struct Operation {
  struct Operation *next;
  int kind;
  char *target;
  const char *source;
  void *snapshot; /* the bytes of pageable memory, taken when the copy was asked for */
  size_t nbytes;
  unsigned char value;
  int64_t due_ms;
} Operation;

typedef struct Stream {
  struct Stream *next;
  Device *device;
  bool blocking;
  Operation *first, **last;
} Stream;
typedef Stream *CUstream;

extern Device devices[MAX_DEVICES];
extern int num_devices;
extern Block *blocks;
extern Allocation *allocations;
extern __thread CUcontext current;

/* fake.c */
CUresult begin(const char *function, bool needs_context);
CUresult end(CUresult result);
const char *state_folder(void);
int64_t now_ms(void);

/* memory.c */
Block *block_of(CUdeviceptr address, size_t nbytes);
Block *map_block(Device *device, int fd, size_t nbytes, uint64_t serial, bool imported);
void drop_block(Block *block, bool poison);
void drop_device_memory(Device *device);

/* ledger.c */
int charge(Device *device, uint64_t serial, size_t nbytes, bool check);
size_t charged(Device *device);

/* streams.c */
CUresult enqueue(Stream *stream, Operation operation);
void run(Stream *stream);
void run_blocking_streams(Device *device);
void run_due(void);
void run_everything(Device *device);
void drop_streams(Device *device);
void drop_registrations(void);
bool is_registered(const void *address, size_t nbytes);

/* Every entry point: answers injected errors, takes the lock, and lets it go with the result. */
#define ENTER(needs_context)                                \
  do {                                                      \
    CUresult refused_ = begin(__func__, needs_context);     \
    if (refused_) return end(refused_);                     \
  } while (0)
#define LEAVE(result) return end(result)

#endif
