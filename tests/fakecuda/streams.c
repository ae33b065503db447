/* Copies and streams. Work that the real driver may do later is done later here: when somebody waits for it, or when the
   delay has passed and the driver is called again. So a missing synchronise reads old bytes, every time. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

static Stream *streams;

typedef struct Region {
  struct Region *next;
  char *address;
  size_t nbytes;
} Region;
static Region *regions;

static int64_t delay_ms(void) {
  const char *text = getenv("KVD_FAKECUDA_DELAY_MS");
  return text ? atoll(text) : 0;
}

static Stream *default_stream(Device *device) {
  if (!device->default_stream) {
    Stream *stream = calloc(1, sizeof *stream);
    *stream = (Stream){.next = streams, .device = device, .blocking = true};
    stream->last = &stream->first;
    streams = device->default_stream = stream;
  }
  return device->default_stream;
}

static void perform(Operation *operation) {
  switch (operation->kind) {
    case FILL:
      memset(operation->target, operation->value, operation->nbytes);
      break;
    default:
      memmove(operation->target, operation->snapshot ? operation->snapshot : operation->source, operation->nbytes);
  }
}

static void run_until(Stream *stream, int64_t now) {
  while (stream->first && (now < 0 || (stream->first->due_ms >= 0 && stream->first->due_ms <= now))) {
    Operation *operation = stream->first;
    perform(operation);
    if (!(stream->first = operation->next)) stream->last = &stream->first;
    free(operation->snapshot);
    free(operation);
  }
}

void run(Stream *stream) { run_until(stream, -1); }

void run_due(void) {
  int64_t now = now_ms();
  for (Stream *stream = streams; stream; stream = stream->next)
    if (!stream->device->lost) run_until(stream, now);
}

void run_blocking_streams(Device *device) {
  for (Stream *stream = streams; stream; stream = stream->next)
    if (stream->device == device && stream->blocking) run(stream);
}

void run_everything(Device *device) {
  for (Stream *stream = streams; stream; stream = stream->next)
    if (stream->device == device && !device->lost) run(stream);
}

void drop_streams(Device *device) {
  for (Stream **at = &streams; *at;) {
    Stream *stream = *at;
    if (stream->device != device) {
      at = &stream->next;
      continue;
    }
    /* The context ends, or the process does: what nobody waited for is never done. */
    while (stream->first) {
      Operation *operation = stream->first;
      stream->first = operation->next;
      free(operation->snapshot);
      free(operation);
    }
    *at = stream->next;
    free(stream);
  }
  device->default_stream = NULL;
}

CUresult enqueue(Stream *stream, Operation operation) {
  Operation *copy = malloc(sizeof *copy);
  *copy = operation;
  copy->next = NULL;
  copy->due_ms = delay_ms() < 0 ? -1 : now_ms() + delay_ms();
  *stream->last = copy;
  stream->last = &copy->next;
  if (!delay_ms()) run(stream);
  return SUCCESS;
}

bool is_registered(const void *address, size_t nbytes) {
  for (Region *region = regions; region; region = region->next)
    if ((const char *)address >= region->address && (const char *)address + nbytes <= region->address + region->nbytes)
      return true;
  return false;
}

void drop_registrations(void) {
  while (regions) {
    Region *region = regions;
    regions = region->next;
    free(region);
  }
}

CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags) {
  ENTER(true);
  (void)flags;
  if (!address || !nbytes) LEAVE(INVALID_VALUE);
  for (Region *region = regions; region; region = region->next)
    if ((char *)address < region->address + region->nbytes && region->address < (char *)address + nbytes)
      LEAVE(ALREADY_REGISTERED);
  Region *region = malloc(sizeof *region);
  *region = (Region){regions, address, nbytes};
  regions = region;
  LEAVE(SUCCESS);
}

CUresult cuMemHostUnregister(void *address) {
  ENTER(true);
  for (Region **at = &regions; *at; at = &(*at)->next)
    if ((*at)->address == (char *)address) {
      Region *region = *at;
      run_everything(current);
      *at = region->next;
      free(region);
      LEAVE(SUCCESS);
    }
  LEAVE(NOT_REGISTERED);
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  ENTER(true);
  Stream *made = calloc(1, sizeof *made);
  *made = (Stream){.next = streams, .device = current, .blocking = !(flags & 1)};
  made->last = &made->first;
  *stream = streams = made;
  LEAVE(SUCCESS);
}

static Stream *find(CUstream stream) {
  if (!stream) return default_stream(current);
  for (Stream *one = streams; one; one = one->next)
    if (one == stream && one->device == current) return one;
  return NULL;
}

CUresult cuStreamSynchronize(CUstream stream) {
  ENTER(true);
  Stream *found = find(stream);
  if (!found) LEAVE(INVALID_HANDLE);
  if (!stream) run_blocking_streams(current);
  run(found);
  LEAVE(SUCCESS);
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  ENTER(true);
  for (Stream **at = &streams; *at; at = &(*at)->next)
    if (*at == stream && stream != current->default_stream) {
      run(stream);
      *at = stream->next;
      free(stream);
      LEAVE(SUCCESS);
    }
  LEAVE(INVALID_HANDLE);
}

static Operation operation(int kind, void *target, const void *source, size_t nbytes) {
  return (Operation){.kind = kind, .target = target, .source = source, .nbytes = nbytes};
}

static void take_snapshot(Operation *copy) {
  copy->snapshot = malloc(copy->nbytes ? copy->nbytes : 1);
  memcpy(copy->snapshot, copy->source, copy->nbytes);
}

#define POINTER(address) ((void *)(uintptr_t)(address))

CUresult cuMemsetD8_v2(CUdeviceptr target, unsigned char value, size_t nbytes) {
  ENTER(true);
  if (!block_of(target, nbytes)) LEAVE(INVALID_VALUE);
  run_blocking_streams(current);
  Operation fill = operation(FILL, POINTER(target), NULL, nbytes);
  fill.value = value;
  LEAVE(enqueue(default_stream(current), fill));
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t nbytes) {
  ENTER(true);
  if (!block_of(target, nbytes)) LEAVE(INVALID_VALUE);
  run_blocking_streams(current);
  Operation copy = operation(TO_DEVICE, POINTER(target), source, nbytes);
  if (is_registered(source, nbytes)) {
    perform(&copy);
    LEAVE(SUCCESS);
  }
  /* From pageable memory it returns when the bytes are staged. */
  take_snapshot(&copy);
  LEAVE(enqueue(default_stream(current), copy));
}

CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t nbytes) {
  ENTER(true);
  if (!block_of(source, nbytes)) LEAVE(INVALID_VALUE);
  run_blocking_streams(current);
  Operation copy = operation(TO_HOST, target, POINTER(source), nbytes);
  perform(&copy);
  LEAVE(SUCCESS);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, size_t nbytes) {
  ENTER(true);
  if (!block_of(target, nbytes) || !block_of(source, nbytes)) LEAVE(INVALID_VALUE);
  run_blocking_streams(current);
  LEAVE(enqueue(default_stream(current), operation(WITHIN_DEVICE, POINTER(target), POINTER(source), nbytes)));
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t nbytes, CUstream stream) {
  ENTER(true);
  Stream *found = find(stream);
  if (!found) LEAVE(INVALID_HANDLE);
  if (!block_of(target, nbytes)) LEAVE(INVALID_VALUE);
  Operation copy = operation(TO_DEVICE, POINTER(target), source, nbytes);
  if (!is_registered(source, nbytes)) take_snapshot(&copy);
  LEAVE(enqueue(found, copy));
}

CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t nbytes, CUstream stream) {
  ENTER(true);
  Stream *found = find(stream);
  if (!found) LEAVE(INVALID_HANDLE);
  if (!block_of(source, nbytes)) LEAVE(INVALID_VALUE);
  enqueue(found, operation(TO_HOST, target, POINTER(source), nbytes));
  /* To pageable memory it waits for itself. */
  if (!is_registered(target, nbytes)) run(found);
  LEAVE(SUCCESS);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t nbytes, CUstream stream) {
  ENTER(true);
  Stream *found = find(stream);
  if (!found) LEAVE(INVALID_HANDLE);
  if (!block_of(target, nbytes) || !block_of(source, nbytes)) LEAVE(INVALID_VALUE);
  LEAVE(enqueue(found, operation(WITHIN_DEVICE, POINTER(target), POINTER(source), nbytes)));
}
