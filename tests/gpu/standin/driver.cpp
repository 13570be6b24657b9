// Devices, modules and launches. Kernels of this project run on the emulator of kernels/cuda; the
// kernels of candle that are needed are in candle.cpp.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "device.hpp"
#include "emulator.hpp"

// The lists of kernels per file.
extern "C" {
#define KERNELS_OF(file) extern emulator::Kernel *emulated_##file;
#include "files.inc"
#undef KERNELS_OF

bool emulator_run_block(const emulator::Kernel *kernel, const uint32_t *grid, uint32_t num_threads,
    uint32_t shared_bytes, const uint32_t *index, uint32_t order, uint64_t seed, void **args,
    char *error, size_t error_room);
}

namespace standin {

extern emulator::Kernel *candle_kernels;

namespace {

/// Where to look for a module's kernels: candle's modules are loaded as text, the project's as
/// machine code.
enum class From { Project, Candle };

const emulator::Kernel *find(From from, const char *name) {
    std::vector<const emulator::Kernel *> lists;
    if (from == From::Candle) lists = {candle_kernels};
    else
        lists = {
#define KERNELS_OF(file) emulated_##file,
#include "files.inc"
#undef KERNELS_OF
        };
    for (const emulator::Kernel *kernel : lists)
        for (; kernel; kernel = kernel->next)
            if (std::strcmp(kernel->name, name) == 0) return kernel;
    return nullptr;
}

/// The number in an environment variable, or a default.
int setting(const char *name, int otherwise) {
    const char *text = std::getenv(name);
    return text ? std::atoi(text) : otherwise;
}

int devices() { return setting("STANDIN_DEVICES", 1); }

/// Threads that run blocks, one after the other or several at a time. There are as many as the
/// machine has processors, for all streams together.
class Multiprocessors {
public:
    Multiprocessors() {
        for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); i++)
            std::thread([this] { work(); }).detach();
    }

    /// Calls `block` with every number below `n`; returns when all calls have ended.
    void run(uint64_t n, const std::function<void(uint64_t)> &block) {
        std::unique_lock<std::mutex> turn(one_grid);
        std::unique_lock<std::mutex> lock(mutex);
        next = done = 0;
        count = n;
        body = &block;
        changed.notify_all();
        changed.wait(lock, [this] { return done == count; });
        body = nullptr;
    }

private:
    void work() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            changed.wait(lock, [this] { return body && next < count; });
            const auto *block = body;
            const uint64_t number = next++;
            lock.unlock();
            (*block)(number);
            lock.lock();
            if (++done == count) changed.notify_all();
        }
    }

    std::mutex one_grid, mutex;
    std::condition_variable changed;
    const std::function<void(uint64_t)> *body = nullptr;
    uint64_t next = 0, done = 0, count = 0;
};

/// A launch with copied arguments.
struct Launch {
    const emulator::Kernel *kernel;
    uint32_t grid[3], threads, shared;
    std::vector<std::vector<char>> arguments;

    void run() {
        static auto *multiprocessors = new Multiprocessors;
        const uint64_t x = grid[0], y = grid[1], z = grid[2];
        multiprocessors->run(x * y * z, [=](uint64_t number) {
            std::vector<void *> addresses;
            for (auto &argument : arguments)
                addresses.push_back(const_cast<char *>(argument.data()));
            const uint32_t index[3] = {static_cast<uint32_t>(number % x),
                static_cast<uint32_t>(number / x % y), static_cast<uint32_t>(number / (x * y))};
            char error[512];
            if (emulator_run_block(kernel, grid, threads, shared, index, 0, 0, addresses.data(),
                    error, sizeof error))
                return;
            fault(std::string(kernel->name) + ": " + error);
        });
    }
};

} // namespace

static thread_local CUcontext current = nullptr;

bool has_context(const char *call) {
    if (!current)
        std::fprintf(stderr, "stand-in for a GPU: %s on a thread without a context\n", call);
    return current;
}

} // namespace standin

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
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = setting("STANDIN_CAPABILITY", 90) / 10;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = setting("STANDIN_CAPABILITY", 90) % 10;
        break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = 3;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        *value = 227 << 10;
        break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
        *value = 4 << 20;
        break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
        *value = 1;
        break;
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}

// Contexts: one for each device, current on every thread.

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = reinterpret_cast<CUcontext>(static_cast<intptr_t>(device) + 1);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }

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

static From of_candle = From::Candle, of_project = From::Project;

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    if (!has_context("cuModuleLoadData")) return CUDA_ERROR_INVALID_CONTEXT;
    constexpr uint32_t MACHINE_CODE = 0xba55ed50;
    uint32_t magic;
    std::memcpy(&magic, image, sizeof magic);
    *module = reinterpret_cast<CUmodule>(magic == MACHINE_CODE ? &of_project : &of_candle);
    return state();
}

CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    const emulator::Kernel *kernel = find(*reinterpret_cast<From *>(module), name);
    if (!kernel) {
        std::fprintf(stderr, "stand-in for a GPU: there is no kernel %s\n", name);
        return CUDA_ERROR_NOT_FOUND;
    }
    *function = reinterpret_cast<CUfunction>(const_cast<emulator::Kernel *>(kernel));
    return state();
}

// The content of a module is always loaded already.
CUresult cuModuleGetFunctionCount(unsigned *count, CUmodule) {
    *count = 0;
    return state();
}
CUresult cuModuleEnumerateFunctions(CUfunction *, unsigned, CUmodule) { return state(); }
CUresult cuFuncLoad(CUfunction) { return state(); }

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
    const auto *kernel = reinterpret_cast<const emulator::Kernel *>(function);
    if (index >= kernel->num_args) return CUDA_ERROR_INVALID_VALUE;
    *offset = 0;
    *size = kernel->sizes[index];
    return CUDA_SUCCESS;
}

// The emulator's form of a tensor map (hopper_emulated.cuh): 16-bit elements in four dimensions,
// swizzled within 128 bytes.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
    void *at, const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
    const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    const bool is_known =
        (type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16) &&
        rank == 4 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
        swizzle == CU_TENSOR_MAP_SWIZZLE_128B && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    bool fits = is_known && reinterpret_cast<uintptr_t>(at) % 16 == 0 &&
                reinterpret_cast<uintptr_t>(map) % 64 == 0 && box[0] * 2 <= 128;
    for (int i = 0; i < 4; i++)
        fits = fits && dims[i] >= 1 && dims[i] <= 1ull << 32 && box[i] >= 1 && box[i] <= 256 &&
               steps[i] == 1;
    for (int i = 0; i < 3; i++) fits = fits && strides[i] % 16 == 0 && strides[i] < 1ull << 40;
    // "Each following dimension specified includes previous dimension stride."
    for (int i = 1; i < 3; i++) fits = fits && strides[i] >= strides[i - 1] * dims[i];
    if (!fits) return CUDA_ERROR_INVALID_VALUE;
    const auto pair = [](uint64_t low, uint64_t high) { return low | high << 32; };
    const uint64_t fields[9] = {reinterpret_cast<uint64_t>(at), pair(dims[0], dims[1]),
        pair(dims[2], dims[3]), pair(box[0], box[1]), pair(box[2], box[3]), 2, strides[0],
        strides[1], strides[2]};
    std::memset(map, 0, sizeof *map);
    std::memcpy(map, fields, sizeof fields);
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }

CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads,
    unsigned threads_y, unsigned threads_z, unsigned shared, CUstream stream, void **parameters,
    void **) {
    if (!has_context("cuLaunchKernel")) return CUDA_ERROR_INVALID_CONTEXT;
    const auto *kernel = reinterpret_cast<const emulator::Kernel *>(function);
    const bool fits =
        threads_y == 1 && threads_z == 1 && threads >= 1 && threads <= 1024 && shared <= 227 << 10;
    if (!fits || x == 0 || y == 0 || z == 0 || y > 65535 || z > 65535)
        return CUDA_ERROR_INVALID_VALUE;
    auto launch = std::make_shared<Launch>();
    launch->kernel = kernel;
    launch->grid[0] = x, launch->grid[1] = y, launch->grid[2] = z;
    launch->threads = threads;
    launch->shared = shared;
    for (uint32_t i = 0; i < kernel->num_args; i++) {
        const char *argument = static_cast<const char *>(parameters[i]);
        launch->arguments.emplace_back(argument, argument + kernel->sizes[i]);
    }
    stream_of(stream).queue(CU_GRAPH_NODE_TYPE_KERNEL, [launch] { launch->run(); });
    return state();
}

} // extern "C"
