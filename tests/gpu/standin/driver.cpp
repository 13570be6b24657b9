// Devices, modules and launches: kernels of this project run on the emulator of kernels/cuda, those of candle that it needs are in candle.cpp.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "device.hpp"
#include "emulator.hpp"

// The lists of the files' kernels.
extern "C" {
#define KERNELS_OF(file) extern emulator::Kernel *emulated_##file;
#include "files.inc"
#undef KERNELS_OF

bool emulator_run_block(const emulator::Kernel *kernel, const uint32_t *grid, uint32_t num_threads, uint32_t shared_bytes, const uint32_t *index,
                        uint32_t order, uint64_t seed, void **args, char *error, size_t error_room);
}

namespace standin {

extern emulator::Kernel *candle_kernels;

namespace {

const emulator::Kernel *find(const char *name) {
    emulator::Kernel *const lists[] = {
#define KERNELS_OF(file) emulated_##file,
#include "files.inc"
#undef KERNELS_OF
        candle_kernels};
    for (const emulator::Kernel *kernel : lists)
        for (; kernel; kernel = kernel->next)
            if (std::strcmp(kernel->name, name) == 0) return kernel;
    return nullptr;
}

/// The number that an environment variable holds, or another.
int setting(const char *name, int otherwise) {
    const char *text = std::getenv(name);
    return text ? std::atoi(text) : otherwise;
}

int devices() { return setting("STANDIN_DEVICES", 1); }

/// A launch whose arguments were copied.
struct Launch {
    const emulator::Kernel *kernel;
    uint32_t grid[3], threads, shared;
    std::vector<std::vector<char>> arguments;

    void run() {
        std::vector<void *> addresses;
        for (auto &argument : arguments) addresses.push_back(argument.data());
        char error[512];
        for (uint32_t z = 0; z < grid[2]; z++)
            for (uint32_t y = 0; y < grid[1]; y++)
                for (uint32_t x = 0; x < grid[0]; x++) {
                    const uint32_t index[3] = {x, y, z};
                    if (emulator_run_block(kernel, grid, threads, shared, index, 0, 0, addresses.data(), error, sizeof error)) continue;
                    return fault(std::string(kernel->name) + ": " + error);
                }
    }
};

}  // namespace

}  // namespace standin

using namespace standin;

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = devices();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal < 0 || ordinal >= devices()) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int room, CUdevice) {
    std::snprintf(name, static_cast<size_t>(room), "stand-in for a GPU");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *id, CUdevice device) {
    std::memset(id, device + 1, sizeof *id);
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice, CUdevice) {
    *can = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = setting("STANDIN_CAPABILITY", 90) / 10; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = setting("STANDIN_CAPABILITY", 90) % 10; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 3; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 << 10; break;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 4 << 20; break;
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = 1; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

// Contexts: one for each device, current on every thread.

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = reinterpret_cast<CUcontext>(static_cast<intptr_t>(device) + 1);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }

static thread_local CUcontext current = nullptr;

CUresult cuCtxSetCurrent(CUcontext context) {
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = static_cast<CUdevice>(reinterpret_cast<intptr_t>(current)) - 1;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    static const std::map<CUresult, const char *> names = {
        {CUDA_SUCCESS, "CUDA_SUCCESS"},
        {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
        {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
        {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY"},
        {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
    };
    auto found = names.find(error);
    *name = found == names.end() ? "CUDA_ERROR_OF_ANOTHER_KIND" : found->second;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }

// Modules: all kernels are in this library, whatever image is loaded.

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = reinterpret_cast<CUmodule>(const_cast<void *>(image));
    return state();
}

CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name) {
    const emulator::Kernel *kernel = find(name);
    if (!kernel) {
        std::fprintf(stderr, "stand-in for a GPU: there is no kernel %s\n", name);
        return CUDA_ERROR_NOT_FOUND;
    }
    *function = reinterpret_cast<CUfunction>(const_cast<emulator::Kernel *>(kernel));
    return state();
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
    const auto *kernel = reinterpret_cast<const emulator::Kernel *>(function);
    if (index >= kernel->num_args) return CUDA_ERROR_INVALID_VALUE;
    *offset = 0;
    *size = kernel->sizes[index];
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }

CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y, unsigned threads_z,
                        unsigned shared, CUstream stream, void **parameters, void **) {
    const auto *kernel = reinterpret_cast<const emulator::Kernel *>(function);
    const bool fits = threads_y == 1 && threads_z == 1 && threads >= 1 && threads <= 1024 && shared <= 227 << 10;
    if (!fits || x == 0 || y == 0 || z == 0 || y > 65535 || z > 65535) return CUDA_ERROR_INVALID_VALUE;
    auto launch = std::make_shared<Launch>();
    launch->kernel = kernel;
    launch->grid[0] = x, launch->grid[1] = y, launch->grid[2] = z;
    launch->threads = threads;
    launch->shared = shared;
    for (uint32_t i = 0; i < kernel->num_args; i++) {
        const char *argument = static_cast<const char *>(parameters[i]);
        launch->arguments.emplace_back(argument, argument + kernel->sizes[i]);
    }
    stream_of(stream).queue([launch] { launch->run(); });
    return state();
}

}  // extern "C"
