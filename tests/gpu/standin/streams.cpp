// Streams and events.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "device.hpp"
#include "graph.hpp"

namespace standin {

namespace {

std::mutex fault_mutex;
bool has_fault = false;

/// Microseconds that every operation waits before it runs (STANDIN_DELAY_US), so that missing order
/// becomes visible.
unsigned delay() {
    static const unsigned microseconds = [] {
        const char *text = std::getenv("STANDIN_DELAY_US");
        return text ? static_cast<unsigned>(std::atoi(text)) : 0u;
    }();
    return microseconds;
}

/// Number of operations of a stream that may wait before the next call waits, too. The driver has
/// about the same limit.
size_t room() {
    static const size_t operations = [] {
        const char *text = std::getenv("STANDIN_QUEUE");
        return text ? static_cast<size_t>(std::atoi(text)) : size_t{1024};
    }();
    return operations;
}

} // namespace

void fault(const std::string &message) {
    std::lock_guard<std::mutex> lock(fault_mutex);
    if (!has_fault) std::fprintf(stderr, "stand-in for a GPU: %s\n", message.c_str());
    has_fault = true;
}

CUresult state() {
    std::lock_guard<std::mutex> lock(fault_mutex);
    return has_fault ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}

namespace {

struct All {
    std::mutex mutex;
    std::set<Stream *> streams;
};

All &all() {
    static auto *of_process = new All;
    return *of_process;
}

} // namespace

Stream::Stream() : thread([this] { work(); }) {
    std::lock_guard<std::mutex> lock(all().mutex);
    all().streams.insert(this);
}

Stream::~Stream() {
    {
        std::lock_guard<std::mutex> lock(all().mutex);
        all().streams.erase(this);
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        ending = true;
        changed.notify_all();
    }
    thread.join();
}

void Stream::queue(std::function<void()> operation) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return operations.size() < room(); });
    operations.push_back(std::move(operation));
    changed.notify_all();
}

bool Stream::has_room() {
    std::lock_guard<std::mutex> lock(mutex);
    return operations.size() < room();
}

void Stream::wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return operations.empty() && !running; });
}

void Stream::wait_for_all() {
    std::lock_guard<std::mutex> lock(all().mutex);
    for (Stream *stream : all().streams) stream->wait();
}

bool Stream::is_idle() {
    std::lock_guard<std::mutex> lock(mutex);
    return operations.empty() && !running;
}

void Stream::work() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        changed.wait(lock, [this] { return !operations.empty() || ending; });
        if (operations.empty()) return;
        auto operation = std::move(operations.front());
        operations.pop_front();
        if (operations.size() + 1 == room()) changed.notify_all();
        running = true;
        lock.unlock();
        if (delay()) std::this_thread::sleep_for(std::chrono::microseconds(delay()));
        operation();
        operation = nullptr;
        lock.lock();
        running = false;
        changed.notify_all();
    }
}

namespace {

/// Recordings are numbered: a wait refers to the last recording at the time when the wait was
/// queued.
struct Event {
    /// Whether the last recording was in a graph, where it is not a point in time.
    bool in_graph = false;
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0, reached = 0;
    std::chrono::steady_clock::time_point when;
};

using SharedEvent = std::shared_ptr<Event>;

SharedEvent &event_of(CUevent handle) { return *reinterpret_cast<SharedEvent *>(handle); }

void await(Event &event, uint64_t number) {
    std::unique_lock<std::mutex> lock(event.mutex);
    event.changed.wait(lock, [&] { return event.reached >= number; });
}

} // namespace

Stream &stream_of(CUstream handle) {
    static auto *of_all = new Stream;
    return handle ? *reinterpret_cast<Stream *>(handle) : *of_all;
}

} // namespace standin

using namespace standin;

extern "C" {

CUresult cuStreamCreate(CUstream *stream, unsigned) {
    if (!has_context("cuStreamCreate")) return CUDA_ERROR_INVALID_CONTEXT;
    *stream = reinterpret_cast<CUstream>(new Stream);
    return state();
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int) {
    return cuStreamCreate(stream, flags);
}

CUresult cuStreamDestroy(CUstream stream) {
    // The driver returns at once, and queued operations still run.
    std::thread([stream] { delete reinterpret_cast<Stream *>(stream); }).detach();
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
    if (const SharedGraph graph = recorded_by(stream))
        return forbid(graph, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a stream is waited for");
    stream_of(stream).wait();
    return state();
}

CUresult cuCtxSynchronize() {
    // Whichever thread records it (CUDA C++ Programming Guide, "Prohibited and Unhandled
    // Operations").
    if (const SharedGraph graph = recorded_by_any())
        return forbid(graph, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the device is waited for");
    Stream::wait_for_all();
    return state();
}

CUresult cuStreamQuery(CUstream stream) {
    if (const SharedGraph graph = recorded_by(stream))
        return forbid(graph, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a stream is asked");
    return stream_of(stream).is_idle() ? state() : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent handle, unsigned) {
    SharedEvent event = event_of(handle);
    const SharedGraph graph = recorded_by(stream);
    uint64_t number;
    {
        std::lock_guard<std::mutex> lock(event->mutex);
        if (event->in_graph && !graph) return CUDA_ERROR_CAPTURED_EVENT;
        if (graph && !event->in_graph)
            return forbid(
                graph, CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "an event from outside is waited for");
        number = event->recorded;
    }
    // A stream is always after its own events.
    if (!graph) stream_of(stream).queue([event, number] { await(*event, number); });
    return state();
}

CUresult cuEventCreate(CUevent *event, unsigned) {
    *event = reinterpret_cast<CUevent>(new SharedEvent(std::make_shared<Event>()));
    return state();
}

CUresult cuEventDestroy(CUevent event) {
    delete &event_of(event);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent handle, CUstream stream) {
    SharedEvent event = event_of(handle);
    const bool in_graph = recorded_by(stream) != nullptr;
    uint64_t number;
    {
        std::lock_guard<std::mutex> lock(event->mutex);
        event->in_graph = in_graph;
        if (in_graph) return state();
        number = ++event->recorded;
    }
    stream_of(stream).queue([event, number] {
        std::lock_guard<std::mutex> lock(event->mutex);
        event->reached = number;
        event->when = std::chrono::steady_clock::now();
        event->changed.notify_all();
    });
    return state();
}

CUresult cuEventQuery(CUevent handle) {
    Event &event = *event_of(handle);
    std::lock_guard<std::mutex> lock(event.mutex);
    if (event.in_graph) return CUDA_ERROR_CAPTURED_EVENT;
    return event.reached >= event.recorded ? state() : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent handle) {
    SharedEvent event = event_of(handle);
    uint64_t number;
    {
        std::lock_guard<std::mutex> lock(event->mutex);
        if (event->in_graph) return CUDA_ERROR_CAPTURED_EVENT;
        number = event->recorded;
    }
    await(*event, number);
    return state();
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to) {
    *milliseconds =
        std::chrono::duration<float, std::milli>(event_of(to)->when - event_of(from)->when).count();
    return state();
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
    stream_of(stream).queue(CU_GRAPH_NODE_TYPE_HOST, [=] { function(data); });
    return state();
}

} // extern "C"
