// Memory of the device: blocks of the process's own, which hold NaNs before they are written and after they are freed.
//
// Freeing is an operation of a stream; a kernel on another stream that still uses the block then reads NaNs. Blocks are kept for a while
// before the system gets them back, so that a late write does not land in somebody else's.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "device.hpp"

namespace standin {

namespace {

constexpr int NOTHING = 0xff;
constexpr size_t KEPT = 256u << 20;

struct Pool {
    std::mutex mutex;
    std::map<char *, size_t> lent;
    std::deque<std::pair<char *, size_t>> freed;
    size_t freed_bytes = 0;
    /// What the driver counts: lent and not yet freed by the program, and what it has got from the system at most.
    uint64_t used = 0, used_high = 0, reserved = 0, reserved_high = 0;
    std::map<char *, size_t> pinned;
};

Pool &pool() {
    static auto *of_process = new Pool;
    return *of_process;
}

/// Bytes of the device's memory (STANDIN_MEMORY_MB).
uint64_t total() {
    static const uint64_t bytes = [] {
        const char *text = std::getenv("STANDIN_MEMORY_MB");
        return static_cast<uint64_t>(text ? std::atoll(text) : 16 << 10) << 20;
    }();
    return bytes;
}

CUresult allocate(CUdeviceptr *at, size_t bytes) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    if (p.used + bytes > total()) return CUDA_ERROR_OUT_OF_MEMORY;
    char *block = static_cast<char *>(std::aligned_alloc(512, (bytes + 511) / 512 * 512));
    if (!block) return CUDA_ERROR_OUT_OF_MEMORY;
    std::memset(block, NOTHING, bytes);
    p.lent[block] = bytes;
    p.used += bytes;
    p.used_high = std::max(p.used_high, p.used);
    p.reserved = std::max(p.reserved, p.used);
    p.reserved_high = std::max(p.reserved_high, p.reserved);
    *at = reinterpret_cast<CUdeviceptr>(block);
    return state();
}

/// In a stream's order.
void release(char *block) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    auto found = p.lent.find(block);
    if (found == p.lent.end()) return fault("memory is freed that was not allocated, or twice");
    std::memset(block, NOTHING, found->second);
    p.freed.emplace_back(block, found->second);
    p.freed_bytes += found->second;
    p.used -= found->second;
    p.lent.erase(found);
    while (p.freed_bytes > KEPT) {
        std::free(p.freed.front().first);
        p.freed_bytes -= p.freed.front().second;
        p.freed.pop_front();
    }
}

/// Whether host memory was allocated for transfers.
bool is_pinned(const void *at) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    auto after = p.pinned.upper_bound(const_cast<char *>(static_cast<const char *>(at)));
    if (after == p.pinned.begin()) return false;
    --after;
    return static_cast<const char *>(at) < after->first + after->second;
}

/// Whether all of it is lent memory of the device; what is not is a fault.
bool check(CUdeviceptr at, size_t bytes, const char *what) {
    Pool &p = pool();
    char *block = reinterpret_cast<char *>(at);
    {
        std::lock_guard<std::mutex> lock(p.mutex);
        auto after = p.lent.upper_bound(block);
        if (after != p.lent.begin() && (--after, block + bytes <= after->first + after->second)) return true;
    }
    fault(std::string(what) + " of memory that is not the device's");
    return false;
}

}  // namespace

}  // namespace standin

using namespace standin;

extern "C" {

CUresult cuMemAlloc(CUdeviceptr *at, size_t bytes) { return allocate(at, bytes); }

CUresult cuMemAllocAsync(CUdeviceptr *at, size_t bytes, CUstream) { return allocate(at, bytes); }

CUresult cuMemFree(CUdeviceptr at) {
    release(reinterpret_cast<char *>(at));
    return state();
}

CUresult cuMemFreeAsync(CUdeviceptr at, CUstream stream) {
    stream_of(stream).queue([at] { release(reinterpret_cast<char *>(at)); });
    return state();
}

CUresult cuMemHostAlloc(void **at, size_t bytes, unsigned) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    char *block = static_cast<char *>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
    if (!block) return CUDA_ERROR_OUT_OF_MEMORY;
    p.pinned[block] = bytes;
    *at = block;
    return state();
}

CUresult cuMemAllocHost(void **at, size_t bytes) { return cuMemHostAlloc(at, bytes, 0); }

CUresult cuMemFreeHost(void *at) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    p.pinned.erase(static_cast<char *>(at));
    std::free(at);
    return CUDA_SUCCESS;
}

CUresult cuMemHostRegister(void *at, size_t bytes, unsigned) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    if (bytes == 0 || !p.pinned.emplace(static_cast<char *>(at), bytes).second) return CUDA_ERROR_INVALID_VALUE;
    return state();
}

CUresult cuMemHostUnregister(void *at) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    return p.pinned.erase(static_cast<char *>(at)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetInfo(size_t *free, size_t *of) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    *of = total();
    *free = total() - p.used;
    return state();
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice) {
    *bytes = total();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *of, CUdevice) {
    *of = reinterpret_cast<CUmemoryPool>(&pool());
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *of, CUdevice device) { return cuDeviceGetDefaultMemPool(of, device); }

CUresult cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute attribute, void *value) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    // Highs can be set to zero, which means to what there is now.
    if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) {
        if (*static_cast<uint64_t *>(value) != 0) return CUDA_ERROR_INVALID_VALUE;
        p.used_high = p.used;
    }
    if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) {
        if (*static_cast<uint64_t *>(value) != 0) return CUDA_ERROR_INVALID_VALUE;
        p.reserved_high = p.reserved;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute attribute, void *value) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    switch (attribute) {
        case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *static_cast<uint64_t *>(value) = p.used; break;
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH: *static_cast<uint64_t *>(value) = p.used_high; break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *static_cast<uint64_t *>(value) = p.reserved; break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: *static_cast<uint64_t *>(value) = p.reserved_high; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool, size_t) { return CUDA_SUCCESS; }

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    if (!check(to, bytes, "a copy to the device")) return state();
    char *at = reinterpret_cast<char *>(to);
    if (is_pinned(from)) {
        stream_of(stream).queue([=] { std::memcpy(at, from, bytes); });
    } else {
        // The driver has taken pageable bytes when it returns.
        const char *first = static_cast<const char *>(from);
        auto taken = std::make_shared<std::vector<char>>(first, first + bytes);
        stream_of(stream).queue([=] { std::memcpy(at, taken->data(), bytes); });
    }
    return state();
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
    cuMemcpyHtoDAsync(to, from, bytes, nullptr);
    return cuStreamSynchronize(nullptr);
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    if (!check(from, bytes, "a copy from the device")) return state();
    const char *at = reinterpret_cast<const char *>(from);
    stream_of(stream).queue([=] { std::memcpy(to, at, bytes); });
    // Into pageable memory the driver copies by itself and returns when it has.
    if (!is_pinned(to)) stream_of(stream).wait();
    return state();
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
    cuMemcpyDtoHAsync(to, from, bytes, nullptr);
    return cuStreamSynchronize(nullptr);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    if (!check(from, bytes, "a copy from") || !check(to, bytes, "a copy to")) return state();
    stream_of(stream).queue([=] { std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes); });
    return state();
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    if (!check(to, bytes, "filling")) return state();
    stream_of(stream).queue([=] { std::memset(reinterpret_cast<void *>(to), value, bytes); });
    return state();
}

}  // extern "C"
