/* Start, errors, injection, contexts and the cards themselves.

   Environment, read at the first cuInit:
     KVD_FAKECUDA_STATE    folder shared by the processes of one machine (required)
     KVD_FAKECUDA_DEVICES  "name|uuid hex|MiB|major.minor|display;..." else a P40 and an RTX 3050
     KVD_FAKECUDA_DELAY_MS how long asynchronous work stays undone unless somebody waits for it; -1 for ever
     KVD_FAKECUDA_FAIL     "function:N=code,..." the Nth call fails; N* every call, N+ from the Nth; code ~ms sleeps instead
     CUDA_VISIBLE_DEVICES  as the real one
   A file `lost.<physical number>` in the state folder makes a card fall off the bus: its content is the code.
   Whatever a rule did to a call of any process is a line of the file `fired` there: "function:number=code".

   The functions `fakecuda_*` are for tests alone: kvd never calls them. */
#include "fake.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

Device devices[MAX_DEVICES];
int num_devices;
__thread CUcontext current;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t started_by;

typedef struct Rule {
  char function[48];
  long from, to;
  int code, sleep_ms;
  long count;
} Rule;
static Rule rules[64];
static int num_rules;

#define MAX_COUNTED 64
static struct { char function[48]; long count; } counted[MAX_COUNTED];

int64_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

const char *state_folder(void) {
  const char *folder = getenv("KVD_FAKECUDA_STATE");
  return folder ? folder : "";
}

void fakecuda_fail(const char *text) {
  num_rules = 0;
  for (const char *at = text; *at && num_rules < 64;) {
    Rule rule = {.from = 1, .to = 1};
    size_t length = strcspn(at, ":");
    snprintf(rule.function, sizeof rule.function, "%.*s", (int)length, at);
    at += length + (at[length] == ':');
    if (*at == '*') {
      rule.to = -1, at++;
    } else {
      char *after;
      rule.from = rule.to = strtol(at, &after, 10), at = after;
      if (*at == '+') rule.to = -1, at++;
    }
    if (*at == '=') at++;
    char *after;
    if (*at == '~')
      rule.sleep_ms = (int)strtol(at + 1, &after, 10);
    else
      rule.code = (int)strtol(at, &after, 10);
    at = after + (*after == ',');
    rules[num_rules++] = rule;
  }
}

long fakecuda_calls(const char *function) {
  for (int i = 0; i < MAX_COUNTED; i++)
    if (!strcmp(counted[i].function, function)) return counted[i].count;
  return 0;
}

void fakecuda_forget_calls(void) { memset(counted, 0, sizeof counted); }

/* Bytes of a card that are held by anybody, or that it has in all. */
long fakecuda_memory(int physical, int total) {
  for (int i = 0; i < num_devices; i++)
    if (devices[i].physical == physical) return (long)(total ? devices[i].total_nbytes : charged(&devices[i]));
  return -1;
}

static void count(const char *function) {
  for (int i = 0; i < MAX_COUNTED; i++) {
    if (!counted[i].function[0]) snprintf(counted[i].function, sizeof counted[i].function, "%s", function);
    if (!strcmp(counted[i].function, function)) {
      counted[i].count++;
      return;
    }
  }
}

/* A rule whose call never comes proves nothing: tests look here. */
static void record(const Rule *rule) {
  char path[4200], line[96];
  snprintf(path, sizeof path, "%s/fired", state_folder());
  int length = snprintf(line, sizeof line, "%s:%ld=%s%d\n", rule->function, rule->count, rule->sleep_ms ? "~" : "",
                        rule->sleep_ms ? rule->sleep_ms : rule->code);
  int fd = open(path, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0 || write(fd, line, (size_t)length) != length) abort();
  close(fd);
}

static int injected(const char *function) {
  int sleep_ms = 0, code = 0;
  for (int i = 0; i < num_rules; i++) {
    Rule *rule = &rules[i];
    if (strcmp(rule->function, function)) continue;
    rule->count++;
    if (rule->count < rule->from || (rule->to > 0 && rule->count > rule->to)) continue;
    if (rule->sleep_ms) sleep_ms = rule->sleep_ms;
    if (rule->code) code = rule->code;
    record(rule);
  }
  if (sleep_ms) {
    struct timespec pause = {sleep_ms / 1000, sleep_ms % 1000 * 1000000L};
    pthread_mutex_unlock(&lock);
    nanosleep(&pause, NULL);
    pthread_mutex_lock(&lock);
  }
  return code;
}

static bool is_sticky(int code) {
  return code == 214 || code == 220 || code == 700 || code == 702 || code == 710 || (code >= 714 && code <= 719);
}

static CUresult off_the_bus(Device *device) {
  char path[4200], text[16] = "";
  snprintf(path, sizeof path, "%s/lost.%d", state_folder(), device->physical);
  FILE *file = fopen(path, "r");
  if (!file) return SUCCESS;
  CUresult code = fgets(text, sizeof text, file) ? atoi(text) : 719;
  fclose(file);
  return code;
}

CUresult begin(const char *function, bool needs_context) {
  if (started_by && started_by != getpid()) {
    /* The lock may have been held by a thread that the child does not have. */
    pthread_mutex_init(&lock, NULL);
    pthread_mutex_lock(&lock);
    return NOT_INITIALIZED;
  }
  pthread_mutex_lock(&lock);
  count(function);
  int code = injected(function);
  if (needs_context && !code) {
    if (!started_by) return NOT_INITIALIZED;
    if (!current || !current->retained) return INVALID_CONTEXT;
    if (!current->lost) current->lost = off_the_bus(current);
    if (current->lost) return current->lost;
  }
  if (is_sticky(code) && current) current->lost = code;
  if (!code) run_due();
  return code;
}

CUresult end(CUresult result) {
  pthread_mutex_unlock(&lock);
  return result;
}

static int hex(char digit) { return isdigit((unsigned char)digit) ? digit - '0' : tolower((unsigned char)digit) - 'a' + 10; }

static void uuid_text(const CUuuid *uuid, char *text) {
  char *at = text + sprintf(text, "GPU-");
  for (int i = 0; i < 16; i++) at += sprintf(at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid->bytes[i]);
}

static int read_devices(Device *all) {
  const char *text = getenv("KVD_FAKECUDA_DEVICES");
  if (!text)
    text = "Tesla P40|a0b1c2d3e4f500112233445566778899|24576|6.1|0;"
           "NVIDIA GeForce RTX 3050|b7000000000000000000000000003050|8192|8.6|1";
  char *copy = strdup(text), *rest = copy, *card;
  int n = 0;
  while ((card = strsep(&rest, ";")) && n < MAX_DEVICES) {
    Device *device = &all[n];
    char id[33] = "";
    unsigned long mib = 0;
    if (sscanf(card, "%95[^|]|%32[0-9a-fA-F]|%lu|%d.%d|%d", device->name, id, &mib, &device->major, &device->minor,
               &device->display) != 6)
      continue;
    for (int i = 0; i < 16; i++) device->uuid.bytes[i] = (unsigned char)(hex(id[2 * i]) << 4 | hex(id[2 * i + 1]));
    device->total_nbytes = mib << 20;
    device->physical = n++;
  }
  free(copy);
  return n;
}

static void choose_visible(void) {
  Device all[MAX_DEVICES] = {0};
  int n = read_devices(all);
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  num_devices = 0;
  if (!visible) {
    memcpy(devices, all, sizeof all);
    num_devices = n;
    return;
  }
  char *copy = strdup(visible), *rest = copy, *word;
  while ((word = strsep(&rest, ","))) {
    int found = -1;
    if (isdigit((unsigned char)*word)) {
      found = atoi(word);
    } else if (!strncmp(word, "GPU-", 4)) {
      for (int i = 0; i < n; i++) {
        char text[48];
        uuid_text(&all[i].uuid, text);
        if (!strncmp(text, word, strlen(word))) found = i;
      }
    }
    /* The first word that names no card ends the list. */
    if (found < 0 || found >= n) break;
    devices[num_devices++] = all[found];
  }
  free(copy);
}

CUresult cuInit(unsigned flags) {
  ENTER(false);
  if (flags) LEAVE(INVALID_VALUE);
  if (!started_by) {
    const char *fail = getenv("KVD_FAKECUDA_FAIL");
    if (fail) {
      fakecuda_fail(fail);
      for (int i = 0; i < num_rules; i++) rules[i].count = !strcmp(rules[i].function, "cuInit");
      for (int i = 0; i < num_rules; i++)
        if (rules[i].count && rules[i].from == 1 && rules[i].code) {
          record(&rules[i]);
          LEAVE(rules[i].code);
        }
    }
    choose_visible();
    if (!*state_folder()) LEAVE(999);
    if (!num_devices) LEAVE(NO_DEVICE);
    started_by = getpid();
  }
  LEAVE(SUCCESS);
}

CUresult cuDriverGetVersion(int *version) {
  ENTER(false);
  *version = 13000;
  LEAVE(SUCCESS);
}

CUresult cuDeviceGetCount(int *count) {
  ENTER(false);
  *count = num_devices;
  LEAVE(SUCCESS);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  ENTER(false);
  if (ordinal < 0 || ordinal >= num_devices) LEAVE(INVALID_DEVICE);
  *device = ordinal;
  LEAVE(SUCCESS);
}

#define CHECK_DEVICE(device) if (device < 0 || device >= num_devices) LEAVE(INVALID_DEVICE)

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  ENTER(false);
  CHECK_DEVICE(device);
  snprintf(name, (size_t)length, "%s", devices[device].name);
  LEAVE(SUCCESS);
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
  ENTER(false);
  CHECK_DEVICE(device);
  *uuid = devices[device].uuid;
  LEAVE(SUCCESS);
}

CUresult cuDeviceTotalMem_v2(size_t *nbytes, CUdevice device) {
  ENTER(false);
  CHECK_DEVICE(device);
  *nbytes = devices[device].total_nbytes;
  LEAVE(SUCCESS);
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
  ENTER(false);
  CHECK_DEVICE(device);
  switch (attribute) {
    case 17: *value = devices[device].display; break; /* KERNEL_EXEC_TIMEOUT */
    case 18: *value = 0; break;                       /* INTEGRATED */
    case 20: *value = 0; break;                       /* COMPUTE_MODE */
    case 32: *value = devices[device].major == 6; break; /* ECC_ENABLED */
    case 33: *value = 0x65 + devices[device].physical; break; /* PCI_BUS_ID */
    case 34: *value = 0; break;                       /* PCI_DEVICE_ID */
    case 50: *value = 0xfa; break;                    /* PCI_DOMAIN_ID: none that a machine has */
    case 75: *value = devices[device].major; break;
    case 76: *value = devices[device].minor; break;
    case 101: *value = 1; break; /* DIRECT_MANAGED_MEM_ACCESS_FROM_HOST: the CPU can touch it */
    default: LEAVE(INVALID_VALUE);
  }
  LEAVE(SUCCESS);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  ENTER(false);
  CHECK_DEVICE(device);
  CUresult lost = off_the_bus(&devices[device]);
  if (lost) LEAVE(lost);
  devices[device].retained++;
  *context = &devices[device];
  LEAVE(SUCCESS);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  ENTER(false);
  CHECK_DEVICE(device);
  Device *d = &devices[device];
  if (!d->retained) LEAVE(INVALID_CONTEXT);
  if (!--d->retained) {
    drop_streams(d);
    drop_device_memory(d);
    d->lost = SUCCESS;
  }
  LEAVE(SUCCESS);
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  ENTER(false);
  *context = current;
  LEAVE(SUCCESS);
}

CUresult cuCtxSetCurrent(CUcontext context) {
  ENTER(false);
  if (context && !context->retained) LEAVE(INVALID_CONTEXT);
  current = context;
  LEAVE(SUCCESS);
}

static const struct { int code; const char *name, *text; } words[] = {
  {0, "CUDA_SUCCESS", "no error"},
  {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
  {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
  {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
  {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
  {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
  {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
  {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
  {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
  {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
  {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
  {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
  {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
  {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
  {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult cuGetErrorName(int code, const char **text) {
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    if (words[i].code == code) return *text = words[i].name, SUCCESS;
  return *text = NULL, INVALID_VALUE;
}

CUresult cuGetErrorString(int code, const char **text) {
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    if (words[i].code == code) return *text = words[i].text, SUCCESS;
  return *text = NULL, INVALID_VALUE;
}

/* What the end of a process does to its contexts; how many references to them were left. */
int fakecuda_end_of_process(void) {
  int left = 0;
  for (int i = 0; i < num_devices; i++) {
    Device *device = &devices[i];
    left += device->retained;
    drop_streams(device);
    drop_device_memory(device);
    drop_registrations();
    device->retained = 0;
    device->lost = SUCCESS;
  }
  current = NULL;
  return left;
}
