// Capture of streams, and graphs. As in the driver, a recorded operation keeps the numbers and
// addresses of the recording.
//
// Only one stream is recorded at a time, by the thread that began it. Waiting on it for events of
// other streams, or elsewhere for its own events, is refused; the driver would create branches
// instead.
#include "graph.hpp"

#include <cstdio>
#include <cstring>

namespace standin {

namespace {

struct Recording {
    std::mutex mutex;
    std::map<Stream *, SharedGraph> of_streams;
};

Recording &recording() {
    static auto *of_process = new Recording;
    return *of_process;
}

thread_local SharedGraph of_thread;

SharedGraph &graph_of(void *handle) { return *static_cast<SharedGraph *>(handle); }

} // namespace

SharedGraph recorded_by(CUstream stream) {
    Recording &all = recording();
    std::lock_guard<std::mutex> lock(all.mutex);
    auto found = all.of_streams.find(&stream_of(stream));
    return found == all.of_streams.end() ? nullptr : found->second;
}

SharedGraph recorded_by_thread() { return of_thread; }

SharedGraph recorded_by_any() {
    Recording &all = recording();
    std::lock_guard<std::mutex> lock(all.mutex);
    return all.of_streams.empty() ? nullptr : all.of_streams.begin()->second;
}

CUresult forbid(const SharedGraph &graph, CUresult why, const char *what) {
    std::fprintf(stderr, "stand-in for a GPU: %s while a graph is recorded\n", what);
    graph->broken = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return why;
}

void Stream::queue(CUgraphNodeType type, std::function<void()> operation) {
    const SharedGraph graph = recorded_by(reinterpret_cast<CUstream>(this));
    if (!graph) return queue(std::move(operation));
    graph->nodes.push_back(std::make_unique<Node>());
    graph->nodes.back()->type = type;
    graph->nodes.back()->run = std::move(operation);
}

} // namespace standin

using namespace standin;

extern "C" {

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode) {
    if (!stream) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (recorded_by(stream) || of_thread) return CUDA_ERROR_ILLEGAL_STATE;
    of_thread = std::make_shared<Graph>();
    Recording &all = recording();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.of_streams[&stream_of(stream)] = of_thread;
    return state();
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *to) {
    *to = nullptr;
    const SharedGraph graph = recorded_by(stream);
    if (!graph) return CUDA_ERROR_ILLEGAL_STATE;
    if (graph != of_thread) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    of_thread = nullptr;
    {
        Recording &all = recording();
        std::lock_guard<std::mutex> lock(all.mutex);
        all.of_streams.erase(&stream_of(stream));
    }
    if (graph->broken != CUDA_SUCCESS) return graph->broken;
    // The driver leaves such memory to the launching code; the program reports that it has none.
    if (!graph->lent.empty()) fault("memory that a graph allocates is not freed in it");
    *to = reinterpret_cast<CUgraph>(new SharedGraph(graph));
    return state();
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    const SharedGraph graph = recorded_by(stream);
    *status = !graph                          ? CU_STREAM_CAPTURE_STATUS_NONE
              : graph->broken != CUDA_SUCCESS ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                              : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long) {
    *exec = reinterpret_cast<CUgraphExec>(new SharedGraph(graph_of(graph)));
    return state();
}

CUresult cuGraphDestroy(CUgraph graph) {
    delete &graph_of(graph);
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    delete &graph_of(exec);
    return CUDA_SUCCESS;
}

CUresult cuGraphUpload(CUgraphExec, CUstream) { return state(); }

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    if (const SharedGraph outer = recorded_by(stream))
        return forbid(outer, CUDA_ERROR_NOT_SUPPORTED, "a graph is launched");
    const SharedGraph graph = graph_of(exec);
    stream_of(stream).queue([graph] {
        for (auto &node : graph->nodes) node->run();
    });
    return state();
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    const auto &all = graph_of(graph)->nodes;
    if (nodes)
        for (size_t i = 0; i < *count && i < all.size(); i++)
            nodes[i] = reinterpret_cast<CUgraphNode>(all[i].get());
    *count = all.size();
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
    *type = reinterpret_cast<Node *>(node)->type;
    return CUDA_SUCCESS;
}

CUresult cuGraphMemcpyNodeGetParams(CUgraphNode handle, CUDA_MEMCPY3D *to) {
    const Node &node = *reinterpret_cast<Node *>(handle);
    if (node.type != CU_GRAPH_NODE_TYPE_MEMCPY) return CUDA_ERROR_INVALID_VALUE;
    std::memset(to, 0, sizeof *to);
    to->srcMemoryType = node.from;
    to->dstMemoryType = node.to;
    return CUDA_SUCCESS;
}

} // extern "C"
