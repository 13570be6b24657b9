// Shared parts of the stand-ins for CUDA's libraries: streams that run asynchronously, and memory
// that records when it was freed.
#pragma once

#include <cuda.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace standin {

/// A queue of operations, which its own thread runs one after the other. A program that does not
/// wait for a result finds it missing.
class Stream {
  public:
    Stream();
    ~Stream();
    /// Adds an operation. Returns at once, unless the queue is full (STANDIN_QUEUE).
    void queue(std::function<void()> operation);
    /// As above; a stream that is recorded adds the operation to its graph instead (graph.cpp).
    void queue(CUgraphNodeType type, std::function<void()> operation);
    /// Whether the queue is not full.
    bool has_room();
    /// Returns when everything queued so far is done.
    void wait();
    /// Whether nothing is queued or running.
    bool is_idle();
    /// As wait(), for all streams.
    static void wait_for_all();

  private:
    void work();
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> operations;
    bool running = false, ending = false;
    std::thread thread;
};

/// The stream behind the driver's handle; null is the default stream.
Stream &stream_of(CUstream handle);

/// Marks the device as unusable, as after a kernel's fault. The first message is kept.
void fault(const std::string &message);

/// Whether the calling thread has a context; without one the driver refuses calls.
bool has_context(const char *call);

/// CUDA_SUCCESS until the first fault.
CUresult state();

}  // namespace standin
