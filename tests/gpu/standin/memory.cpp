// Memory of the device: separate blocks of the process, which hold NaNs before they are written and
// after they are freed.
//
// Freeing is an operation of a stream, so a kernel on another stream that still uses the block
// reads NaNs. Freed blocks are kept for a while before they return to the system, so that a late
// write does not hit another owner's memory.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "device.hpp"
#include "graph.hpp"

namespace standin {

namespace {

constexpr int NOTHING = 0xff;
constexpr size_t KEPT = 256u << 20;

struct Pool {
    std::mutex mutex;
    std::map<char *, size_t> lent;
    std::deque<std::pair<char *, size_t>> freed;
    size_t freed_bytes = 0;
    /// The driver's counts: memory lent to the program and not yet freed, and the maximum taken
    /// from the system.
    uint64_t used = 0, used_high = 0, reserved = 0, reserved_high = 0;
    /// For graphs: the memory allocated at present, and the memory reserved for them.
    uint64_t in_graphs = 0, in_graphs_high = 0, graphs_reserved = 0;
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

/// The room that the device still has. Call it with the pool's lock held.
CUresult reserve(const Pool &p, char **block, size_t bytes) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (p.used + p.graphs_reserved + bytes > total()) return CUDA_ERROR_OUT_OF_MEMORY;
    *block = static_cast<char *>(std::aligned_alloc(512, (bytes + 511) / 512 * 512));
    return *block ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult allocate(CUdeviceptr *at, size_t bytes) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    char *block;
    if (const CUresult result = reserve(p, &block, bytes)) return result;
    std::memset(block, NOTHING, bytes);
    p.lent[block] = bytes;
    p.used += bytes;
    p.used_high = std::max(p.used_high, p.used);
    p.reserved = std::max(p.reserved, p.used);
    p.reserved_high = std::max(p.reserved_high, p.reserved);
    *at = reinterpret_cast<CUdeviceptr>(block);
    return state();
}

/// In the order of a stream.
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

/// A graph's own allocation at its launch, at the address of the recording.
void lend(char *block, size_t bytes) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    std::memset(block, NOTHING, bytes);
    p.lent[block] = bytes;
    p.in_graphs += bytes;
    p.in_graphs_high = std::max(p.in_graphs_high, p.in_graphs);
}

void take_back(char *block, size_t bytes) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    std::memset(block, NOTHING, bytes);
    p.lent.erase(block);
    p.in_graphs -= bytes;
}

/// A call that a thread must not make while it records.
CUresult forbidden(const char *what) {
    const SharedGraph graph = recorded_by_thread();
    return graph ? forbid(graph, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, what) : CUDA_SUCCESS;
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

/// Whether all of it is lent memory of the device; other memory is a fault.
bool check(CUdeviceptr at, size_t bytes, const char *what) {
    Pool &p = pool();
    char *block = reinterpret_cast<char *>(at);
    {
        std::lock_guard<std::mutex> lock(p.mutex);
        auto after = p.lent.upper_bound(block);
        if (after != p.lent.begin() && (--after, block + bytes <= after->first + after->second))
            return true;
    }
    fault(std::string(what) + " of memory that is not the device's");
    return false;
}

/// Queues a copy, or records it with the location of both ends.
void copy(CUstream stream, CUmemorytype from, CUmemorytype to, std::function<void()> run) {
    stream_of(stream).queue(CU_GRAPH_NODE_TYPE_MEMCPY, std::move(run));
    if (const SharedGraph graph = recorded_by(stream)) {
        graph->nodes.back()->from = from;
        graph->nodes.back()->to = to;
    }
}

} // namespace

CUresult allocate_in(Graph &graph, CUdeviceptr *at, size_t bytes) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    char *block;
    if (const CUresult result = reserve(p, &block, bytes)) return result;
    p.graphs_reserved += bytes;
    // Recorded operations may name this memory, although it holds nothing until the graph is
    // launched.
    p.lent[block] = bytes;
    graph.blocks[block] = graph.lent[block] = bytes;
    graph.nodes.push_back(std::make_unique<Node>());
    graph.nodes.back()->type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    graph.nodes.back()->run = [=] { lend(block, bytes); };
    *at = reinterpret_cast<CUdeviceptr>(block);
    return state();
}

CUresult free_in(const SharedGraph &graph, CUdeviceptr at) {
    char *block = reinterpret_cast<char *>(at);
    auto found = graph->lent.find(block);
    if (found == graph->lent.end())
        return forbid(graph, CUDA_ERROR_INVALID_VALUE, "memory from before it is freed");
    const size_t bytes = found->second;
    graph->lent.erase(found);
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    p.lent.erase(block);
    graph->nodes.push_back(std::make_unique<Node>());
    graph->nodes.back()->type = CU_GRAPH_NODE_TYPE_MEM_FREE;
    graph->nodes.back()->run = [=] { take_back(block, bytes); };
    return state();
}

Graph::~Graph() {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    for (auto &block : blocks) {
        p.lent.erase(block.first);
        p.graphs_reserved -= block.second;
        std::free(block.first);
    }
}

} // namespace standin

using namespace standin;

extern "C" {

CUresult cuMemAlloc(CUdeviceptr *at, size_t bytes) {
    if (const CUresult refused = forbidden("memory is allocated outside of the stream's order"))
        return refused;
    return allocate(at, bytes);
}

CUresult cuMemAllocAsync(CUdeviceptr *at, size_t bytes, CUstream stream) {
    if (!has_context("cuMemAllocAsync")) return CUDA_ERROR_INVALID_CONTEXT;
    if (const SharedGraph graph = recorded_by(stream)) return allocate_in(*graph, at, bytes);
    return allocate(at, bytes);
}

CUresult cuMemFree(CUdeviceptr at) {
    if (const CUresult refused = forbidden("memory is freed outside of the stream's order"))
        return refused;
    release(reinterpret_cast<char *>(at));
    return state();
}

CUresult cuMemFreeAsync(CUdeviceptr at, CUstream stream) {
    if (const SharedGraph graph = recorded_by(stream)) return free_in(graph, at);
    stream_of(stream).queue([at] { release(reinterpret_cast<char *>(at)); });
    return state();
}

CUresult cuMemHostAlloc(void **at, size_t bytes, unsigned) {
    if (const CUresult refused = forbidden("memory of the host is locked")) return refused;
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
    if (!has_context("cuMemHostRegister")) return CUDA_ERROR_INVALID_CONTEXT;
    if (const CUresult refused = forbidden("memory of the host is locked")) return refused;
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    if (bytes == 0 || !p.pinned.emplace(static_cast<char *>(at), bytes).second)
        return CUDA_ERROR_INVALID_VALUE;
    return state();
}

CUresult cuMemHostUnregister(void *at) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    return p.pinned.erase(static_cast<char *>(at)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetInfo(size_t *free, size_t *of) {
    if (!has_context("cuMemGetInfo")) return CUDA_ERROR_INVALID_CONTEXT;
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

CUresult cuDeviceGetMemPool(CUmemoryPool *of, CUdevice device) {
    return cuDeviceGetDefaultMemPool(of, device);
}

CUresult cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute attribute, void *value) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    // A high-water mark can be set to zero, which resets it to the present value.
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
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        *static_cast<uint64_t *>(value) = p.used;
        break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        *static_cast<uint64_t *>(value) = p.used_high;
        break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        *static_cast<uint64_t *>(value) = p.reserved;
        break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        *static_cast<uint64_t *>(value) = p.reserved_high;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool, size_t keep) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    p.reserved = std::max<uint64_t>(p.used, std::min<uint64_t>(p.reserved, keep));
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice, CUgraphMem_attribute attribute, void *value) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    auto &to = *static_cast<uint64_t *>(value);
    switch (attribute) {
    case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT:
        to = p.in_graphs;
        break;
    case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH:
        to = p.in_graphs_high;
        break;
    default:
        to = p.graphs_reserved;
    }
    return CUDA_SUCCESS;
}

/// Only the kind of memory. Memory that the driver does not know gives an error.
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr at) {
    if (attribute != CU_POINTER_ATTRIBUTE_MEMORY_TYPE) return CUDA_ERROR_NOT_SUPPORTED;
    if (!is_pinned(reinterpret_cast<const void *>(at))) return CUDA_ERROR_INVALID_VALUE;
    *static_cast<CUmemorytype *>(value) = CU_MEMORYTYPE_HOST;
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    if (!has_context("cuMemcpyHtoDAsync")) return CUDA_ERROR_INVALID_CONTEXT;
    if (!check(to, bytes, "a copy to the device")) return state();
    char *at = reinterpret_cast<char *>(to);
    if (is_pinned(from)) {
        copy(stream, CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE,
            [=] { std::memcpy(at, from, bytes); });
    } else {
        // The driver has copied pageable bytes when it returns.
        const char *first = static_cast<const char *>(from);
        auto taken = std::make_shared<std::vector<char>>(first, first + bytes);
        copy(stream, CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE,
            [=] { std::memcpy(at, taken->data(), bytes); });
    }
    return state();
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
    cuMemcpyHtoDAsync(to, from, bytes, nullptr);
    return cuStreamSynchronize(nullptr);
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    if (!has_context("cuMemcpyDtoHAsync")) return CUDA_ERROR_INVALID_CONTEXT;
    if (!check(from, bytes, "a copy from the device")) return state();
    const char *at = reinterpret_cast<const char *>(from);
    copy(stream, CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST, [=] { std::memcpy(to, at, bytes); });
    // The driver itself copies into pageable memory and returns afterwards.
    if (!is_pinned(to) && !recorded_by(stream)) { stream_of(stream).wait(); }
    return state();
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
    cuMemcpyDtoHAsync(to, from, bytes, nullptr);
    return cuStreamSynchronize(nullptr);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    if (!check(from, bytes, "a copy from") || !check(to, bytes, "a copy to")) return state();
    copy(stream, CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_DEVICE, [=] {
        std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes);
    });
    return state();
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    if (!check(to, bytes, "filling")) return state();
    stream_of(stream).queue(CU_GRAPH_NODE_TYPE_MEMSET,
        [=] { std::memset(reinterpret_cast<void *>(to), value, bytes); });
    return state();
}

} // extern "C"
