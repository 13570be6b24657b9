// What the stand-ins for CUDA's libraries share: streams that run behind the program's back, and
// memory that remembers when it was freed.
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

/// A queue of operations, run one after the other by a thread of its own, so that whoever does not
/// wait for a result gets to see it missing.
class Stream {
  public:
    Stream();
    ~Stream();
    /// Adds an operation; returns at once, unless so many wait that the queue is full
    /// (STANDIN_QUEUE).
    void queue(std::function<void()> operation);
    /// As above; a stream that is recorded adds it to its graph instead (graph.cpp).
    void queue(CUgraphNodeType type, std::function<void()> operation);
    /// Whether the queue is not full.
    bool has_room();
    /// Returns when all that was queued so far is done.
    void wait();
    /// Whether nothing is queued or running.
    bool is_idle();
    /// As wait(), for every stream there is.
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

/// Says that the device is of no more use, as after a kernel's fault; the first message stays.
void fault(const std::string &message);

/// Whether the calling thread has a context, without which the driver refuses a call.
bool has_context(const char *call);

/// CUDA_SUCCESS until the first fault.
CUresult state();

}  // namespace standin
