// A libcuda.so.1 for machines without a GPU: it loads real cubins and checks launches as the driver does, but runs none.
//
// It has two devices of the architecture STAND_IN_ARCH, such as 90. It checks what a driver checks: that a thread has a
// context, that a stream belongs to it, that a cubin fits the device and has the kernel, and that grid, block, registers
// and shared memory are within the limits. It appends a JSON object for each launch or refusal to the file STAND_IN_LOG.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201,
       NO_BINARY_FOR_GPU = 209, INVALID_HANDLE = 400, NOT_FOUND = 500, OUT_OF_RESOURCES = 701 };
enum { DEVICES = 2, MAX_PARAMETERS = 64, SHARED = 48 * 1024, RESERVED = 1024, REGISTERS = 65536 };

typedef struct { int device; } Context;
typedef struct { Context* context; } Stream;
typedef struct Code Code;
typedef struct {
  Code* code;
  const char* name;
  int parameters, sizes[MAX_PARAMETERS], offsets[MAX_PARAMETERS];
  int registers, local, max_threads, fixed_shared, dynamic_shared;
} Kernel;  // fixed_shared: in the source; dynamic_shared: the most that a launch may add
struct Code {
  Context* context;  // of a module; a library has none
  int count;
  Kernel kernels[256];
};
typedef struct {
  unsigned grid[3], block[3], shared;
  Stream* stream;
  void* attributes;
  unsigned num_attributes;
} Config;

static Context contexts[DEVICES] = {{0}, {1}};
static _Thread_local Context* stack[16];
static _Thread_local int depth;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Context* current(void) { return depth ? stack[depth - 1] : NULL; }
static int arch(void) { return atoi(getenv("STAND_IN_ARCH")); }
static int shared_of_arch(void) {
  int number = arch();
  return (number == 80 || number == 87 ? 163 : number >= 90 && number < 120 ? 227 : 99) * 1024;
}

static void note(const char* format, ...) {
  va_list given;
  va_start(given, format);
  pthread_mutex_lock(&lock);
  FILE* file = fopen(getenv("STAND_IN_LOG"), "a");
  vfprintf(file, format, given);
  fclose(file);
  pthread_mutex_unlock(&lock);
  va_end(given);
}

static int refuse(int code, const char* kernel, const char* why) {
  note("{\"refused\": \"%s\", \"kernel\": \"%s\", \"code\": %d}\n", why, kernel, code);
  return code;
}

// Cubins: a section .text.NAME for each kernel, and its attributes in .nv.info (by symbol) and .nv.info.NAME.

static Kernel* find(Code* code, const char* name) {
  for (int i = 0; i < code->count; i++)
    if (!strcmp(code->kernels[i].name, name)) return &code->kernels[i];
  return NULL;
}

static void read_attributes(Code* code, Kernel* kernel, const char* at, const char* end, const char* names,
                            const Elf64_Sym* symbols) {
  while (at < end) {
    int format = at[0], attribute = (unsigned char)at[1], size = *(const uint16_t*)(at + 2);
    const uint32_t* words = (const uint32_t*)(at + 4);
    at += format == 4 ? 4 + size : 4;
    if (format != 4) continue;
    if (attribute == 0x17 && kernel) {  // KPARAM_INFO: index, ordinal and offset, size and others
      int ordinal = words[1] & 0xffff;
      if (ordinal >= MAX_PARAMETERS) abort();
      kernel->offsets[ordinal] = words[1] >> 16;
      kernel->sizes[ordinal] = words[2] >> 18;
      if (kernel->parameters <= ordinal) kernel->parameters = ordinal + 1;
    } else if (attribute == 0x05 && kernel) {  // MAX_THREADS, of __launch_bounds__
      kernel->max_threads = words[0] * words[1] * words[2];
    } else if (attribute == 0x2f || attribute == 0x11) {  // REGCOUNT, FRAME_SIZE
      Kernel* of_symbol = find(code, names + symbols[words[0]].st_name);
      if (of_symbol) *(attribute == 0x2f ? &of_symbol->registers : &of_symbol->local) = words[1];
    }
  }
}

static int load(Code** result, const void* image, Context* context) {
  const Elf64_Ehdr* header = image;
  if (memcmp(header->e_ident, ELFMAG, SELFMAG) || header->e_machine != EM_CUDA)
    return refuse(INVALID_IMAGE, "", "no cubin");
  int built_for = header->e_ident[EI_ABIVERSION] >= 8 ? header->e_flags >> 8 & 0xff : header->e_flags & 0xff;
  // Machine code runs on the same major version from its own minor version on.
  if (built_for / 10 != arch() / 10 || built_for > arch()) return refuse(NO_BINARY_FOR_GPU, "", "other architecture");
  Code* code = *result = calloc(1, sizeof(Code));
  code->context = context;
  const char* bytes = image;
  const Elf64_Shdr* sections = (const Elf64_Shdr*)(bytes + header->e_shoff);
  const char* names = bytes + sections[header->e_shstrndx].sh_offset;
  const Elf64_Shdr *symbols = NULL, *end = sections + header->e_shnum;
  for (const Elf64_Shdr* s = sections; s < end; s++) {
    if (s->sh_type == SHT_SYMTAB) symbols = s;
    if (strncmp(names + s->sh_name, ".text.", 6)) continue;
    if (code->count == 256) abort();
    Kernel made = {code, strdup(names + s->sh_name + 6), .max_threads = 1024, .dynamic_shared = SHARED};
    code->kernels[code->count++] = made;
  }
  const char* strings = bytes + sections[symbols->sh_link].sh_offset;
  for (const Elf64_Shdr* s = sections; s < end; s++) {
    const char *name = names + s->sh_name, *data = bytes + s->sh_offset;
    Kernel* shared = strncmp(name, ".nv.shared.", 11) ? NULL : find(code, name + 11);
    if (shared && s->sh_size > RESERVED) {
      shared->fixed_shared = s->sh_size - RESERVED;
      shared->dynamic_shared = SHARED - shared->fixed_shared;
    }
    if (!strcmp(name, ".nv.info") || !strncmp(name, ".nv.info.", 9))
      read_attributes(code, name[8] ? find(code, name + 9) : NULL, data, data + s->sh_size, strings,
                      (const Elf64_Sym*)(bytes + symbols->sh_offset));
  }
  return OK;
}

static int get_kernel(Kernel** result, Code* code, const char* name) {
  *result = find(code, name);
  return *result ? OK : refuse(NOT_FOUND, name, "no such kernel");
}

static int launch(const Config* config, Kernel* kernel, void** values) {
  const unsigned *grid = config->grid, *block = config->block;
  uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
  const char* name = kernel->name;
  if (!current()) return refuse(INVALID_CONTEXT, name, "the thread has no context");
  if (kernel->code->context && kernel->code->context != current())
    return refuse(INVALID_HANDLE, name, "the module belongs to another context");
  if ((uintptr_t)config->stream > 2 && config->stream->context != current())
    return refuse(INVALID_HANDLE, name, "the stream belongs to another context");
  if (!grid[0] || !grid[1] || !grid[2] || grid[0] > INT32_MAX || grid[1] > 65535 || grid[2] > 65535)
    return refuse(INVALID_VALUE, name, "grid");
  if (!threads || block[0] > 1024 || block[1] > 1024 || block[2] > 64 || threads > (uint64_t)kernel->max_threads)
    return refuse(INVALID_VALUE, name, "block");
  if ((threads + 31) / 32 * ((kernel->registers * 32 + 255) / 256 * 256) > REGISTERS)
    return refuse(OUT_OF_RESOURCES, name, "registers");
  if (config->shared > (unsigned)kernel->dynamic_shared)
    return refuse(INVALID_VALUE, name, "shared memory");
  char text[MAX_PARAMETERS * 32] = "";
  for (int i = 0, used = 0; i < kernel->parameters; i++) {
    uint64_t value = 0;
    if (!values || !values[i]) return refuse(INVALID_VALUE, name, "too few arguments");
    if (kernel->sizes[i] > 8) return refuse(INVALID_VALUE, name, "a parameter of more than 8 bytes");
    memcpy(&value, values[i], kernel->sizes[i]);
    used += sprintf(text + used, "%s[%d, %llu]", i ? ", " : "", kernel->sizes[i], (unsigned long long)value);
  }
  note("{\"kernel\": \"%s\", \"device\": %d, \"thread\": %d, \"stream\": %llu, \"grid\": [%u, %u, %u], "
       "\"block\": [%u, %u, %u], \"shared\": %u, \"fixed_shared\": %d, \"registers\": %d, \"local\": %d, "
       "\"arguments\": [%s]}\n",
       name, current()->device, gettid(), (unsigned long long)(uintptr_t)config->stream, grid[0], grid[1], grid[2],
       block[0], block[1], block[2], config->shared, kernel->fixed_shared, kernel->registers, kernel->local, text);
  return OK;
}

// The driver's functions that cuda.core and Triton call. A caller that asks for another one is told that it is missing.

#define API __attribute__((visibility("default"))) int

API cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
  static void* self;
  if (!self) self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  *function = dlsym(self, name);
  if (status) *status = *function ? 0 : 1;
  return *function ? OK : NOT_FOUND;
}
API cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
API cuGetExportTable(const void** table, const void* id) {  // NVRTC asks for one, and reads its size
  static const size_t size = sizeof(size_t);
  return *table = &size, OK;
}
API cuInit(unsigned flags) { return OK; }
API cuDriverGetVersion(int* version) { return *version = 13000, OK; }
API cuGetErrorName(int code, const char** text) {
  switch (code) {
    case INVALID_VALUE: *text = "CUDA_ERROR_INVALID_VALUE"; break;
    case INVALID_DEVICE: *text = "CUDA_ERROR_INVALID_DEVICE"; break;
    case INVALID_IMAGE: *text = "CUDA_ERROR_INVALID_IMAGE"; break;
    case INVALID_CONTEXT: *text = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case NO_BINARY_FOR_GPU: *text = "CUDA_ERROR_NO_BINARY_FOR_GPU"; break;
    case INVALID_HANDLE: *text = "CUDA_ERROR_INVALID_HANDLE"; break;
    case NOT_FOUND: *text = "CUDA_ERROR_NOT_FOUND"; break;
    case OUT_OF_RESOURCES: *text = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"; break;
    default: *text = "unknown";
  }
  return OK;
}
API cuGetErrorString(int code, const char** text) { return cuGetErrorName(code, text); }
API cuDeviceGetCount(int* count) { return *count = DEVICES, OK; }
API cuDeviceGet(int* device, int ordinal) {
  return *device = ordinal, ordinal >= 0 && ordinal < DEVICES ? OK : INVALID_DEVICE;
}
API cuDeviceGetName(char* name, int size, int device) { return snprintf(name, size, "stand-in"), OK; }
API cuDeviceGetUuid_v2(unsigned char* id, int device) { return memset(id, device, 16), OK; }
API cuDeviceGetUuid(unsigned char* id, int device) { return cuDeviceGetUuid_v2(id, device); }
API cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break;  // threads per block, and along x and y
    case 4: *value = 64; break;
    case 5: *value = INT32_MAX; break;
    case 6: case 7: *value = 65535; break;
    case 8: *value = SHARED; break;
    case 10: *value = 32; break;
    case 12: *value = REGISTERS; break;
    case 16: *value = 132; break;  // multiprocessors
    case 75: *value = arch() / 10; break;
    case 76: *value = arch() % 10; break;
    case 97: *value = shared_of_arch(); break;
    default: *value = 0;
  }
  return OK;
}
API cuDevicePrimaryCtxRetain(Context** context, int device) { return *context = &contexts[device], OK; }
API cuDevicePrimaryCtxRelease(int device) { return OK; }
API cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
API cuCtxGetCurrent(Context** context) { return *context = current(), OK; }
API cuCtxSetCurrent(Context* context) {
  if (depth) depth--;
  if (context) stack[depth++] = context;
  return OK;
}
API cuCtxPushCurrent(Context* context) { return stack[depth++] = context, OK; }
API cuCtxPushCurrent_v2(Context* context) { return cuCtxPushCurrent(context); }
API cuCtxPopCurrent(Context** context) {
  if (!depth) return INVALID_CONTEXT;
  depth--;
  if (context) *context = stack[depth];
  return OK;
}
API cuCtxPopCurrent_v2(Context** context) { return cuCtxPopCurrent(context); }
API cuCtxGetDevice(int* device) { return current() ? (*device = current()->device, OK) : INVALID_CONTEXT; }
API cuStreamCreate(Stream** stream, unsigned flags) {
  if (!current()) return INVALID_CONTEXT;
  *stream = malloc(sizeof(Stream));
  (*stream)->context = current();
  return OK;
}
API cuStreamGetCtx(Stream* stream, Context** context) {
  *context = (uintptr_t)stream > 2 ? stream->context : current();
  return *context ? OK : INVALID_CONTEXT;
}
API cuLibraryLoadData(Code** code, const void* image, int* options, void** values, unsigned count, int* library_options,
                      void** library_values, unsigned library_count) {
  return load(code, image, NULL);
}
API cuLibraryUnload(Code* code) { return OK; }
API cuLibraryGetKernel(Kernel** kernel, Code* code, const char* name) { return get_kernel(kernel, code, name); }
API cuKernelGetLibrary(Code** code, Kernel* kernel) { return *code = kernel->code, OK; }
API cuKernelGetFunction(Kernel** function, Kernel* kernel) { return *function = kernel, OK; }
API cuKernelGetParamInfo(Kernel* kernel, size_t index, size_t* offset, size_t* size) {
  if (index >= (size_t)kernel->parameters) return INVALID_VALUE;
  *offset = kernel->offsets[index];
  if (size) *size = kernel->sizes[index];
  return OK;
}
API cuModuleLoadData(Code** code, const void* image) {
  return current() ? load(code, image, current()) : refuse(INVALID_CONTEXT, "", "the thread has no context");
}
API cuModuleUnload(Code* code) { return OK; }
API cuModuleGetFunction(Kernel** kernel, Code* code, const char* name) { return get_kernel(kernel, code, name); }
API cuFuncGetAttribute(int* value, int attribute, Kernel* kernel) {
  int known[] = {kernel->max_threads, kernel->fixed_shared, 0, kernel->local, kernel->registers};
  return *value = attribute < 5 ? known[attribute] : 0, OK;
}
API cuFuncSetAttribute(Kernel* kernel, int attribute, int value) {
  if (attribute != 8) return INVALID_VALUE;  // as a driver that is older than the caller
  if (value > shared_of_arch() - kernel->fixed_shared) return refuse(INVALID_VALUE, kernel->name, "shared memory");
  return kernel->dynamic_shared = value, OK;
}
API cuCtxGetLimit(size_t* value, int limit) { return *value = 0, OK; }
API cuCtxSetLimit(int limit, size_t value) { return OK; }
API cuStreamIsCapturing(Stream* stream, int* status) { return *status = 0, OK; }
API cuFuncSetCacheConfig(Kernel* kernel, int config) { return OK; }
API cuPointerGetAttribute(void* value, int attribute, uint64_t pointer) {
  return attribute == 3 ? (*(uint64_t*)value = pointer, OK) : INVALID_VALUE;  // DEVICE_POINTER
}
API cuLaunchKernelEx(const Config* config, Kernel* kernel, void** values, void** extra) {
  return launch(config, kernel, values);
}
API cuLaunchKernel(Kernel* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, Stream* stream, void** values, void** extra) {
  Config config = {{gx, gy, gz}, {bx, by, bz}, shared, stream, NULL, 0};
  return launch(&config, kernel, values);
}
