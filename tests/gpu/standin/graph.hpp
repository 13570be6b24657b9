// Graphs: operations that a stream records instead of running them, to be run as often as the
// program launches them.
#pragma once

#include <map>
#include <vector>

#include "device.hpp"

namespace standin {

struct Node {
    CUgraphNodeType type;
    /// For a copy: whether one of its ends is host memory.
    CUmemorytype from = CU_MEMORYTYPE_DEVICE, to = CU_MEMORYTYPE_DEVICE;
    std::function<void()> run;
};

/// The operations that one stream recorded, in order.
struct Graph {
    std::vector<std::unique_ptr<Node>> nodes;
    /// Memory that the graph allocates. It keeps its address, and holds NaNs before it is allocated
    /// and after it is freed.
    std::map<char *, size_t> blocks;
    /// The part of it that is allocated and not freed at this point of the recording.
    std::map<char *, size_t> lent;
    /// The reason why the recording is invalid.
    CUresult broken = CUDA_SUCCESS;
    ~Graph();
};

using SharedGraph = std::shared_ptr<Graph>;

/// The graph that a stream is recording, if any. An operation that cannot be recorded invalidates
/// it.
SharedGraph recorded_by(CUstream stream);

/// A call that a recording forbids: invalidates it, and returns the driver's error.
CUresult forbid(const SharedGraph &graph, CUresult why, const char *what);

/// Whether this thread has begun a recording that has not ended. Some calls are then forbidden on
/// all streams.
SharedGraph recorded_by_thread();

/// A graph that any thread is recording.
SharedGraph recorded_by_any();

// Memory of graphs, in memory.cpp.
CUresult allocate_in(Graph &graph, CUdeviceptr *at, size_t bytes);
CUresult free_in(const SharedGraph &graph, CUdeviceptr at);

}  // namespace standin
