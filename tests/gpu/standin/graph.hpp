// Graphs: operations that a stream records instead of running them, to be run as often as the
// program launches them.
#pragma once

#include <map>
#include <vector>

#include "device.hpp"

namespace standin {

struct Node {
    CUgraphNodeType type;
    /// Of a copy: whether an end of it is the host's memory.
    CUmemorytype from = CU_MEMORYTYPE_DEVICE, to = CU_MEMORYTYPE_DEVICE;
    std::function<void()> run;
};

/// What one stream recorded, in its order.
struct Graph {
    std::vector<std::unique_ptr<Node>> nodes;
    /// Memory that the graph allocates: it stays where it is, and holds NaNs before it is allocated
    /// and after it is freed.
    std::map<char *, size_t> blocks;
    /// Of these, what is allocated and not freed at this point of the recording.
    std::map<char *, size_t> lent;
    /// What made the recording useless.
    CUresult broken = CUDA_SUCCESS;
    ~Graph();
};

using SharedGraph = std::shared_ptr<Graph>;

/// The graph that a stream records, if it does. What cannot be recorded breaks it.
SharedGraph recorded_by(CUstream stream);

/// A call that a recording forbids: breaks it, and returns what the driver says.
CUresult forbid(const SharedGraph &graph, CUresult why, const char *what);

/// Whether this thread has begun a recording that has not ended: some calls are then forbidden on
/// all streams.
SharedGraph recorded_by_thread();

/// One that is recorded, by whichever thread.
SharedGraph recorded_by_any();

// Memory of graphs, in memory.cpp.
CUresult allocate_in(Graph &graph, CUdeviceptr *at, size_t bytes);
CUresult free_in(const SharedGraph &graph, CUdeviceptr at);

}  // namespace standin
