// Records, in order, a program's calls to NVIDIA's driver that take the host's time: queued
// kernels, and calls that wait for the device. It stands between the program and the driver, either
// the real one or the stand-in (tests/gpu/standin), and changes nothing.
//
//   cc -O2 -shared -fPIC -o watch.so watch.c -ldl && WATCH_TRACE=FILE LD_PRELOAD=watch.so program …
//
// A line is `kernel NAME` (for the program's own kernels; otherwise `kernel of LIBRARY`), `graph`
// (the launch of a recorded graph), or `wait FUNCTION`, followed by `of LIBRARY` if a library waits
// and not the program. With RANK in the environment the file is FILE.RANK.
//
// Programs and libraries find the driver's functions by dlsym, or by cuGetProcAddress, which they
// find by dlsym. Both are defined here. For each watched function they return a trampoline, which
// records the call and jumps to the function with all registers unchanged.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

#ifndef __x86_64__
#error "the trampolines are for x86-64"
#endif

// Registers of a call; the first argument is last.
enum { ARG_5, ARG_4, ARG_3, ARG_2, ARG_1, ARG_0 };

enum kind {
    WAITS,       // for the device, or for all that is queued on a stream
    FROM_HOST,   // if the host's memory, its second argument, is pageable
    TO_HOST,     // if the host's memory, its first argument, is pageable
    LAUNCHES,    // the function that is its first argument
    LAUNCHES_EX, // the function that is its second argument
    GRAPH,
};

static const struct {
    const char *name; // without the suffixes of versions
    enum kind kind;
} WATCHED[] = {
    {"cuCtxSynchronize", WAITS},
    {"cuStreamSynchronize", WAITS},
    {"cuEventSynchronize", WAITS},
    {"cuMemAlloc", WAITS},
    {"cuMemFree", WAITS},
    {"cuMemFreeHost", WAITS},
    {"cuMemHostAlloc", WAITS},
    {"cuMemAllocHost", WAITS},
    {"cuMemHostRegister", WAITS},
    {"cuMemHostUnregister", WAITS},
    {"cuMemPoolTrimTo", WAITS},
    {"cuMemUnmap", WAITS},
    {"cuModuleLoadData", WAITS},
    {"cuModuleLoadDataEx", WAITS},
    {"cuModuleLoadFatBinary", WAITS},
    {"cuModuleUnload", WAITS},
    {"cuLibraryLoadData", WAITS},
    {"cuLibraryUnload", WAITS},
    {"cuMemcpy", WAITS},
    {"cuMemcpyHtoD", WAITS},
    {"cuMemcpyDtoH", WAITS},
    {"cuMemcpyHtoDAsync", FROM_HOST},
    {"cuMemcpyDtoHAsync", TO_HOST},
    {"cuGraphLaunch", GRAPH},
    {"cuLaunchKernel", LAUNCHES},
    {"cuLaunchCooperativeKernel", LAUNCHES},
    {"cuLaunchKernelEx", LAUNCHES_EX},
};

// A function that was returned to a caller.
enum { SLOTS = 128 };
static struct {
    const char *name;
    enum kind kind;
    void *function;
} slots[SLOTS];
static int num_slots;

// Names of kernels by the driver's handles.
struct kernel {
    void *function;
    char *name;
    struct kernel *next;
};
static struct kernel *kernels;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int (*pointer_attribute)(void *, int, uintptr_t);
static int (*module_function)(void **, void *, const char *);
static int (*proc_address)(const char *, void **, int, uint64_t);
static int (*proc_address_2)(const char *, void **, int, uint64_t, void *);

// The loader's own dlsym.
void *watch_dlsym_itself(void) {
    static void *found;
    if (!found) found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!found) found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    return found;
}

static void write_line(const char *what, const char *name, const char *of) {
    static FILE *file;
    static int opened;
    pthread_mutex_lock(&mutex);
    if (!opened) {
        const char *path = getenv("WATCH_TRACE"), *rank = getenv("RANK");
        char of_rank[4096];
        opened = 1;
        if (path) {
            snprintf(of_rank, sizeof of_rank, rank ? "%s.%s" : "%s", path, rank);
            file = fopen(of_rank, "a");
        }
    }
    if (file) {
        fprintf(file, "%s%s%s%s%s\n", what, *name ? " " : "", name, of ? " of " : "", of ? of : "");
        fflush(file);
    }
    pthread_mutex_unlock(&mutex);
}

// The library that contains `at`; none for the program itself.
static const char *library_of(void *at) {
    Dl_info there, program;
    if (!dladdr(at, &there) || !there.dli_fname) return "an unknown library";
    if (dladdr((void *)getauxval(AT_ENTRY), &program) && program.dli_fbase == there.dli_fbase)
        return NULL;
    const char *slash = strrchr(there.dli_fname, '/');
    return slash ? slash + 1 : there.dli_fname;
}

static int is_pageable(uintptr_t host) {
    unsigned type = 0;
    const int MEMORY_TYPE =
        2; // CU_POINTER_ATTRIBUTE_MEMORY_TYPE: an error of memory that the driver does not know
    return pointer_attribute && pointer_attribute(&type, MEMORY_TYPE, host) != 0;
}

static const char *kernel_name(void *function) {
    const char *name = "of no known name";
    pthread_mutex_lock(&mutex);
    for (struct kernel *k = kernels; k; k = k->next)
        if (k->function == function) {
            name = k->name;
            break;
        }
    pthread_mutex_unlock(&mutex);
    return name;
}

// Called by every trampoline; returns the function to jump to.
void *watch_call(long slot, const uintptr_t *registers, void *caller) {
    const char *name = slots[slot].name, *of = library_of(caller);
    char text[128];
    switch (slots[slot].kind) {
    case WAITS:
        write_line("wait", name, of);
        break;
    case FROM_HOST:
    case TO_HOST:
        if (is_pageable(registers[slots[slot].kind == TO_HOST ? ARG_0 : ARG_1])) {
            snprintf(text, sizeof text, "%s with pageable memory", name);
            write_line("wait", text, of);
        }
        break;
    case LAUNCHES:
    case LAUNCHES_EX:
        // Only the program's kernels are known to be functions of modules.
        write_line("kernel",
            of ? "" : kernel_name((void *)registers[slots[slot].kind == LAUNCHES ? ARG_0 : ARG_1]),
            of);
        break;
    case GRAPH:
        write_line("graph", "", of);
        break;
    }
    return slots[slot].function;
}

// The trampolines are 16 bytes apart. At the call of watch_call the stack is aligned: seven words
// were pushed after the caller's address.
__asm__(".text\n"
        ".p2align 4\n"
        "watch_trampolines:\n"
        ".set watch_slot, 0\n"
        ".rept 128\n"
        "  .p2align 4\n"
        "  pushq $watch_slot\n"
        "  jmp watch_common\n"
        "  .set watch_slot, watch_slot + 1\n"
        ".endr\n"
        ".p2align 4\n"
        "watch_common:\n"
        "  pushq %rdi\n  pushq %rsi\n  pushq %rdx\n  pushq %rcx\n  pushq %r8\n  pushq %r9\n"
        "  movq 48(%rsp), %rdi\n"
        "  movq %rsp, %rsi\n"
        "  movq 56(%rsp), %rdx\n"
        "  call watch_call@PLT\n"
        "  popq %r9\n  popq %r8\n  popq %rcx\n  popq %rdx\n  popq %rsi\n  popq %rdi\n"
        "  addq $8, %rsp\n"
        "  jmpq *%rax\n");
extern const char watch_trampolines[];

static int module_function_watched(void **function, void *module, const char *name) {
    int status = module_function(function, module, name);
    if (status == 0) {
        struct kernel *k = malloc(sizeof *k);
        *k = (struct kernel){.function = *function, .name = strdup(name)};
        pthread_mutex_lock(&mutex);
        k->next = kernels;
        kernels = k;
        pthread_mutex_unlock(&mutex);
    }
    return status;
}

static void *instead_of(const char *name, void *function);

// The driver's own name for cuGetProcAddress, which has two variants with different arguments.
static const char *of_version(const char *name, int version) {
    return version >= 12000 && !strcmp(name, "cuGetProcAddress") ? "cuGetProcAddress_v2" : name;
}

static int proc_address_watched(const char *name, void **function, int version, uint64_t flags) {
    int status = proc_address(name, function, version, flags);
    if (status == 0 && *function) *function = instead_of(of_version(name, version), *function);
    return status;
}

static int proc_address_2_watched(
    const char *name, void **function, int version, uint64_t flags, void *found) {
    int status = proc_address_2(name, function, version, flags, found);
    if (status == 0 && *function) *function = instead_of(of_version(name, version), *function);
    return status;
}

// Whether `name` is `base`, with or without the suffix of a version or of a default-stream variant.
static int is(const char *name, const char *base) {
    size_t len = strlen(base);
    if (strncmp(name, base, len)) return 0;
    static const char *const suffixes[] = {
        "", "_v2", "_v3", "_ptsz", "_ptds", "_v2_ptsz", "_v2_ptds"};
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++)
        if (!strcmp(name + len, suffixes[i])) return 1;
    return 0;
}

// The function that a program receives when it asks for a function of the driver.
static void *instead_of(const char *name, void *function) {
    if (!strcmp(name, "cuPointerGetAttribute")) pointer_attribute = function;
    if (!strcmp(name, "cuModuleGetFunction") && function != module_function_watched) {
        module_function = function;
        return module_function_watched;
    }
    if (!strcmp(name, "cuGetProcAddress_v2") && function != proc_address_2_watched) {
        proc_address_2 = function;
        return proc_address_2_watched;
    }
    if (!strcmp(name, "cuGetProcAddress") && function != proc_address_watched) {
        proc_address = function;
        return proc_address_watched;
    }
    for (size_t i = 0; i < sizeof WATCHED / sizeof *WATCHED; i++) {
        if (!is(name, WATCHED[i].name)) continue;
        pthread_mutex_lock(&mutex);
        int slot = 0;
        while (slot < num_slots && slots[slot].function != function) slot++;
        if (slot == num_slots && num_slots < SLOTS) {
            slots[slot].name = WATCHED[i].name;
            slots[slot].kind = WATCHED[i].kind;
            slots[slot].function = function;
            num_slots++;
        }
        pthread_mutex_unlock(&mutex);
        return slot < SLOTS ? (void *)(watch_trampolines + 16 * slot) : function;
    }
    return function;
}

void *watch_dlsym(void *handle, const char *name) {
    void *(*itself)(void *, const char *) = watch_dlsym_itself();
    void *function = itself(handle, name);
    if (!function || strncmp(name, "cu", 2)) return function;
    if (!pointer_attribute) pointer_attribute = itself(handle, "cuPointerGetAttribute");
    return instead_of(name, function);
}

// The meaning of RTLD_NEXT depends on the caller, so the loader's own dlsym is jumped to.
__asm__(".text\n"
        ".globl dlsym\n"
        ".type dlsym, @function\n"
        "dlsym:\n"
        "  cmpq $-1, %rdi\n"
        "  jne watch_dlsym@PLT\n"
        "  pushq %rdi\n  pushq %rsi\n  subq $8, %rsp\n"
        "  call watch_dlsym_itself@PLT\n"
        "  addq $8, %rsp\n  popq %rsi\n  popq %rdi\n"
        "  jmpq *%rax\n");
